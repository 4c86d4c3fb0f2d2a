"""What all writing of weights shares: flushing to the disk, and saying in words why it failed.

Must not know what is written.
"""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor


def sync(path: Path) -> None:
    """Flushes a file's or folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def failure(error: OSError | SafetensorError, folder: Path, tensors: Iterable[Tensor]) -> str:
    """Why tensors could not be written to a folder; of a full disk the bytes needed and free."""
    return reason(error, folder, sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def reason(error: OSError | SafetensorError, folder: Path, needed: int) -> str:
    """The same where the number of bytes is known."""
    text = str(error)
    full = error.errno == errno.ENOSPC if isinstance(error, OSError) else f"os error {errno.ENOSPC}" in text
    if full:
        return f"no space left: {needed} bytes of weights needed, {shutil.disk_usage(folder).free} free"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a file is in the way; expected a folder"
    return text

"""The machine and software for bug reports and bit-equal results, without secrets.

What is shown may end in a public issue. So only variables of known names are shown, and of these values everything that
looks like a password or a key is hidden.
"""

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bert_tasks.errors import UsageError

# Variables whose names begin like this are shown, because libraries that the package uses read them.
_VARIABLES = re.compile(
    r"ACCELERATE_|AIM_|BERT_TASKS_|CUBLAS_|CUDA_|GLOO_|GOMP_|HF_|HUGGING_?FACE|KMP_|LANG$|LC_|LOCAL_RANK$|LRU_CACHE_|MASTER_|MKL_|MLFLOW_|ORT_"
    r"|NCCL_|NO_COLOR$|NVIDIA_|OMP_|ONEDNN_|OPENBLAS_|PYTHON|PYTORCH_|RANK$|REQUESTS_CA|SLURM_(NNODES|NTASKS|PROCID)|SSL_"
    r"|TENSORBOARD|TERM$|TMPDIR$|TOKENIZERS_|TORCH|TRACKIO_|TRANSFORMERS_|WANDB_|WORLD_SIZE$|XDG_CACHE_HOME$|\w*_PROXY$",
    re.IGNORECASE,
)
# A value is not shown at all if the name of its variable has one of these parts.
_SECRET_NAME = re.compile(
    r"TOKEN|KEY|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|SESSION|PRIVATE|SIGNATURE|USER|HEADERS", re.IGNORECASE
)
# Secrets in values, such as keys of the hub, of cloud services and of W&B, and credentials in URLs.
_SECRET_VALUE = (
    (re.compile(r"([a-z][a-z0-9+.\-]*://)[^\s'\"<>]*@", re.IGNORECASE), r"\1***@"),
    (re.compile(r"^[^/\s@:]+:[^/\s@]+@"), "***@"),
    (re.compile(r"([?&][\w.\-]*(?:token|key|secret|pass|sig|auth)[\w.\-]*=)[^&\s#]+", re.IGNORECASE), r"\1***"),
    (re.compile(r"\b(Bearer|Basic)\s+\S+", re.IGNORECASE), r"\1 ***"),
    (
        re.compile(r"\b(?:hf|api|sk|gsk|gh[oprsu]|glpat|github_pat|xox[a-z]|xai|pypi|npm|r8)[_\-][A-Za-z0-9_\-]{16,}"),
        "***",
    ),
    (
        re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b|\bAIza[A-Za-z0-9_\-]{30,}|\bya29\.[\w\-]{16,}|\b[0-9a-fA-F]{40}\b"),
        "***",
    ),
    # A JSON web token. Its header and payload are JSON objects in base64, so that both begin with "eyJ".
    (re.compile(r"\beyJ[A-Za-z0-9_\-]{6,}\.eyJ[A-Za-z0-9_\-]{2,}\.[A-Za-z0-9_\-]*"), "***"),
)


def environment() -> dict[str, Any]:
    """Returns the JSON of ``bert-tasks env``."""
    system = ""
    with suppress(OSError):
        system = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    offline = [os.environ.get(name, "").strip().upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")]
    names = ["bert-tasks"]
    requirements = importlib.metadata.requires("bert-tasks")
    if requirements is not None:
        # A requirement is a name with versions, extras and markers behind it, such as "torch>=2.4; extra == 'x'".
        names += sorted(re.split(r"[^\w.-]", requirement)[0] for requirement in requirements)
    versions = {}
    for name in names:
        version = installed_version(name)
        if version is not None:
            versions[name] = version
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "versions": versions,
        "system": f"{platform.platform()} {system}".strip(),
        "cpu": {
            "name": cpu_name(),
            "cores": os.cpu_count(),
            "usable_cores": _known(lambda: len(os.sched_getaffinity(0))),
        },
        "memory": _known(_memory),
        "torch": _known(_torch),
        "offline": any(value in ("1", "ON", "YES", "TRUE") for value in offline),
        "folders": {name: _folder(path) for name, path in cache_folders().items()},
        "variables": shown_variables(os.environ),
    }


def cache_folders() -> dict[str, Path]:
    """Returns the cache folders of Hugging Face's libraries, by their variables."""
    # The defaults are those of huggingface_hub and datasets.
    home = Path(os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"))
    usual_folders = {"HF_HOME": home, "HF_HUB_CACHE": home / "hub", "HF_DATASETS_CACHE": home / "datasets"}
    folders = {}
    for variable, usual_folder in usual_folders.items():
        folders[variable] = Path(os.environ.get(variable, usual_folder)).expanduser()
    return folders


def environment_lines(content: Mapping[str, Any], indent: str = "") -> list[str]:
    """Returns lines of the environment for a terminal, one for each value, below headings."""
    width = max((len(name) for name in content), default=0)
    lines = []
    for name, value in content.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", *environment_lines(value, f"{indent}  ")]
            continue
        text = str(value)
        if value is None:
            text = "-"
        elif isinstance(value, list):
            text = "; ".join(map(str, value))
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        lines.append(f"{indent}{name:<{width}}  {text}")
    return lines


def installed_version(name: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_libraries(names: Iterable[str], *, extra: str, purpose: str) -> None:
    """Raises UsageError with an install command if a library of an extra is missing."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} not installed, needed for {purpose}. Run `pip install '.[{extra}]'`")


def cpu_name() -> str:
    """Returns the model of the processor, or Python's name for it."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"^model name\s*: *(.*\S)", text, re.MULTILINE | re.IGNORECASE):
            return match[1]
    return platform.processor() or platform.machine()


def shown_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to show. Values that may be secret are hidden."""
    shown = {}
    for name, value in sorted(variables.items()):
        if _VARIABLES.match(name):
            shown[name] = "(set)" if _may_be_secret(name) else masked(value)
    return shown


def masked(text: str) -> str:
    """Returns the text without credentials in URLs and without possible keys."""
    for pattern, replacement in _SECRET_VALUE:
        text = pattern.sub(replacement, text)
    return text


def _may_be_secret(name: str) -> bool:
    """Returns True for names such as HF_TOKEN, but not for TOKENIZERS_PARALLELISM, which contains TOKEN, too."""
    return _SECRET_NAME.search(re.sub("TOKENIZERS?", "", name, flags=re.IGNORECASE)) is not None


def _known(find: Callable[[], Any]) -> Any:
    """Returns the result of a function, or the reason why it failed."""
    try:
        return find()
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError, UsageError) as error:
        return f"not known ({type(error).__name__}: {masked(str(error))[:200]})"


def _memory() -> dict[str, str]:
    """Returns the sizes of the memory, with the limit of a container if there is one."""
    page = os.sysconf("SC_PAGE_SIZE")
    sizes = {"total": page * os.sysconf("SC_PHYS_PAGES"), "free": page * os.sysconf("SC_AVPHYS_PAGES")}
    limit = Path("/sys/fs/cgroup/memory.max")  # of version 2 of control groups, "max" without a limit
    if limit.is_file():
        text = limit.read_text(encoding="ascii").strip()
        if text.isdigit():
            sizes["limit"] = int(text)
    return {name: _gib(size) for name, size in sizes.items()}


def _torch() -> dict[str, Any]:
    """Returns what torch computes with. Each part may fail by itself, for example with a broken driver."""
    import torch

    from bert_tasks.encoder.cpu import matmul_library

    report: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "matmul_library": _known(matmul_library),
        "cuda": torch.version.cuda,
        "devices": ["cpu"],
    }
    if torch.cuda.is_available():
        devices = []
        for number in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(number)
            capability = f"compute capability {device.major}.{device.minor}"
            devices.append(f"cuda:{number} {device.name}, {_gib(device.total_memory)}, {capability}")
        report["devices"] = devices
        report["cudnn"] = _known(torch.backends.cudnn.version)
        report["bf16"] = torch.cuda.is_bf16_supported()
    return report


def _folder(path: Path) -> str:
    """Returns a folder with its state and the free space. One that does not exist yet will be in its nearest parent."""
    existing = next(parent for parent in (path, *path.absolute().parents) if os.path.exists(parent))
    free = _known(lambda: f"{_gib(shutil.disk_usage(existing).free)} free")
    states = []
    if existing != path:
        states.append("does not exist yet")
    if not os.access(existing, os.W_OK):
        states.append("not writable")
    return f"{path} ({', '.join([*states, free])})"


def _gib(size: float) -> str:
    """Formats a number of bytes."""
    return f"{size / 2**30:.1f} GiB"

"""The machine and the software: what a bug report needs and what bit-equal results depend on, without secrets.

A piece that is missing or broken is reported as such and never raises an error.
"""

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = (
    "bert-tasks",
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "datasets",
    "evaluate",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "pyarrow",
    "pydantic",
    "typer",
    "onnx",
    "onnxruntime",
    "fastapi",
    "uvicorn",
    "tensorboard",
    "wandb",
    "mlflow",
    "mlflow-skinny",
    "trackio",
)
# Variables whose names begin like this are shown.
_VARIABLES = re.compile(
    r"ACCELERATE_|AIM_|BERT_TASKS_|CUBLAS_|CUDA_|GLOO_|GOMP_|HF_|HUGGING_?FACE|KMP_|LANG$|LC_|LOCAL_RANK$|MASTER_|MKL_|MLFLOW_|ORT_"
    r"|NCCL_|NO_COLOR$|NVIDIA_|OMP_|ONEDNN_|OPENBLAS_|PYTHON|PYTORCH_|RANK$|REQUESTS_CA|SLURM_(NNODES|NTASKS|PROCID)|SSL_"
    r"|TENSORBOARD|TERM$|TMPDIR$|TOKENIZERS_|TORCH|TRACKIO_|TRANSFORMERS_|WANDB_|WORLD_SIZE$|XDG_CACHE_HOME$|\w*_PROXY$",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(
    r"TOKEN|KEY|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|SESSION|PRIVATE|SIGNATURE|USER|HEADERS", re.IGNORECASE
)
# Secrets in values: keys of the hub, of cloud services and of W&B, and credentials in URLs.
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
    # A JSON web token: its header and payload are JSON objects in base64, so that both begin with "eyJ".
    (re.compile(r"\beyJ[A-Za-z0-9_\-]{6,}\.eyJ[A-Za-z0-9_\-]{2,}\.[A-Za-z0-9_\-]*"), "***"),
)
# These keep libraries from reporting to their makers. A tracker that a recipe names still receives the metrics.
TELEMETRY_OFF: Mapping[str, str] = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime >= 1.29: a device id, the interpreter's path, properties of the graph
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub: library versions in the header of every request
    "HF_XET_TELEMETRY_ENABLED": "false",  # hf_xet: figures about a transfer
    "MLFLOW_DISABLE_TELEMETRY": "true",  # mlflow >= 3.2
    "WANDB_ERROR_REPORTING": "false",  # wandb: its own crashes
    "GRADIO_ANALYTICS_ENABLED": "False",  # gradio, which trackio imports
}
_ASSIGNED = re.compile(r"^(--?[\w.\-]+|[\w.\-]+)=(.*)$", re.DOTALL)


def disable_telemetry() -> None:
    """Disables the telemetry of libraries; they read these variables when they are imported or first used.

    A variable that the user has set is not changed.
    """
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)


def environment(*, devices: bool = True) -> dict[str, Any]:
    """Everything that ``bert-tasks env`` shows, as JSON.

    Args:
        devices: whether to ask torch, which takes seconds to import.
    """
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "versions": {name: installed_version(name) for name in PACKAGES},
        "commit": _known(_commit),
        "system": _known(_system),
        "cpu": {"name": cpu_name(), "cores": os.cpu_count(), "usable_cores": _known(_usable_cores)},
        "memory": _known(_memory),
        "torch": _known(_torch) if devices else "not asked",
        "offline": any(_is_on(os.environ.get(name)) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")),
        "folders": {name: _folder(path) for name, path in _folders().items()},
        "variables": shown_variables(os.environ),
    }


def environment_lines(content: Mapping[str, Any]) -> list[str]:
    """The environment for a terminal: one line per value, indented below its heading."""
    return list(_lines(content, ""))


def installed_version(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def shown_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables to show; for one that may contain a secret only that it is set."""
    return {
        name: "(set)" if _may_be_secret(name) else masked(value)
        for name, value in sorted(variables.items())
        if _VARIABLES.match(name)
    }


def masked(text: str) -> str:
    """The text without credentials in URLs and without anything that looks like a key."""
    for pattern, replacement in _SECRET_VALUE:
        text = pattern.sub(replacement, text)
    return text


def masked_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line without secrets: neither values of options such as ``--token`` nor what ``masked`` finds."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        shown.append("***" if hide_next else _masked_argument(argument))
        hide_next = argument.startswith("--") and "=" not in argument and _may_be_secret(argument)
    return shown


def _masked_argument(argument: str) -> str:
    """An assignment may contain another one: ``--set=run.token=X``."""
    names, rest = "", argument
    while (assigned := _ASSIGNED.match(rest)) is not None:
        names, rest = f"{names}{assigned[1]}=", assigned[2]
        if _may_be_secret(assigned[1]):
            return f"{names}***"
    return names + masked(rest)


def _may_be_secret(name: str) -> bool:
    return _SECRET_NAME.search(re.sub("TOKENIZERS?", "", name, flags=re.IGNORECASE)) is not None


def _known(find: Callable[[], Any]) -> Any:
    """The result of a function, or why it failed."""
    try:
        return find()
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        return f"not known ({type(error).__name__}: {masked(str(error))[:200]})"


def _commit() -> str | None:
    """The commit of the checkout that this package is imported from; None if it is installed."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists() or not (root / "pyproject.toml").is_file():
        return None
    git = ("git", "-C", str(root))
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    commit = subprocess.run([*git, "rev-parse", "HEAD"], **options).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], **options).stdout.strip()
    return f"{commit} (changed)" if changed else str(commit)


def _system() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    return f"{platform.platform()} {name}".strip()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def _memory() -> dict[str, str]:
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    found = {"total": _gib(page * pages), "free": _gib(page * os.sysconf("SC_AVPHYS_PAGES"))}
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return found | ({"limit": _gib(int(text))} if text.isdigit() else {})


def _torch() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    found: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "devices": [_device(number) for number in range(torch.cuda.device_count())] if cuda else ["cpu"],
    }
    if cuda:
        found |= {"driver": _known(_driver), "cudnn": _known(_cudnn)}
        found |= {"bf16": torch.cuda.is_bf16_supported()}
    return found


def _device(number: int) -> str:
    import torch

    device = torch.cuda.get_device_properties(number)
    return f"cuda:{number} {device.name}, {_gib(device.total_memory)}, compute capability {device.major}.{device.minor}"


def _cudnn() -> int | None:
    import torch

    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch does not type it
    return version


def _driver() -> str:
    first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", first)
    return first if found is None else found[0]


def _folders() -> dict[str, Path]:
    """The cache folders of Hugging Face's libraries, by their documented rules."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = Path(os.environ.get("HF_HOME", cache / "huggingface"))
    named = {"HF_HOME": home, "HF_HUB_CACHE": home / "hub", "HF_DATASETS_CACHE": home / "datasets"}
    return {name: Path(os.environ.get(name, path)).expanduser() for name, path in named.items()}


def _folder(path: Path) -> str:
    existing = next((parent for parent in (path, *path.absolute().parents) if os.path.exists(parent)), None)
    if existing is None:
        return f"{path} (cannot be created)"
    free = _known(lambda: f"{_gib(shutil.disk_usage(existing).free)} free")
    state = [] if existing == path else ["does not exist yet"]
    state += [] if os.access(existing, os.W_OK) else ["not writable"]
    return f"{path} ({', '.join([*state, free])})"


def _is_on(value: str | None) -> bool:
    return value is not None and value.strip().upper() in ("1", "ON", "YES", "TRUE")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _lines(content: Mapping[str, Any], indent: str) -> Iterator[str]:
    width = max((len(name) for name in content), default=0)
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ")
        else:
            yield f"{indent}{name:<{width}}  {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def return_freed_memory() -> None:
    """Returns what the heap holds of freed tensors; does nothing where the C library is not glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> Any:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None

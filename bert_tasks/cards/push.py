"""Uploads a model folder to the hub.

Owns the choice of files (the model and its card, nothing else in the folder) and the error messages. huggingface_hub
handles the endpoint, the token and the transfer. A token is never in a message.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants, errors, get_token
from huggingface_hub.utils import httpx, validate_repo_id  # type: ignore[attr-defined]  # exported at run time only

from bert_tasks.cards.card import CARD, write_card
from bert_tasks.checkpoints.hub import CONFIG, PICKLES, REFUSED_TOKEN, is_model_file, model_folder
from bert_tasks.checkpoints.inspect import inspect_checkpoint
from bert_tasks.data.issues import counted, missing_path
from bert_tasks.environment import masked
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.storage import check_path
from bert_tasks.tables import Result
from bert_tasks.training import files as outputs

_ACCOMPANYING = (CARD, "LICENSE*", "NOTICE*", "onnx/model*.onnx*")
_MAIN = "main"
_REFUSALS = {  # by the status of the hub's response
    401: REFUSED_TOKEN,
    403: "The token may not write there (403). Use one with write permission, and check the owner's name",
    404: "The hub knows no such owner or repository, or hides it from this token (404). Check the spelling",
    413: "The hub rejects files of this size (413)",
}


@dataclass(frozen=True, kw_only=True)
class Push(Result):
    """An upload, or the plan of one.

    Attributes:
        files: Name of each file -> size in bytes.
        left_out: Names of the other files in the folder.
        url: Address of the new commit. None before it, and for a dry run.
    """

    folder: Path
    repo: str
    branch: str
    public: bool
    files: dict[str, int]
    left_out: tuple[str, ...]
    url: str | None = None

    def lines(self) -> list[str]:
        """Returns the files with their sizes and their target, for a terminal."""
        lines = [f"{size:>14,}  {name}" for name, size in self.files.items()]
        lines.append(f"{sum(self.files.values()):>14,}  bytes in {counted(len(self.files), 'file')} from {self.folder}")
        if self.left_out:
            lines.append(f"left out: {', '.join(self.left_out)}")
        visibility = "public" if self.public else "private"
        if self.url is None:
            return [*lines, f"dry run, which sent nothing to {self.repo} ({visibility}), branch {self.branch}"]
        return [*lines, f"{self.repo} ({visibility}), branch {self.branch}: {self.url}"]


def push(
    model: str | Path,
    repo: str,
    *,
    dry_run: bool = False,
    public: bool = False,
    branch: str = _MAIN,
    message: str = "Upload a model trained with bert_tasks",
    languages: Sequence[str] | None = None,
    licence: str | None = None,
) -> Push:
    """Uploads a model folder to the hub, in one commit.

    Args:
        model: The folder of a model or of a finished run.
        repo: ``OWNER/NAME``. It is created if it does not exist.
        dry_run: True to only list the files, without contacting the hub.
        public: True if a new repository is public, and an existing one may be.
        branch: Branch of the repository, which is created if it does not exist. Default: main.
        message: Message of the commit.
        languages, licence: Write the card of the run again, as ``write_card`` does. Default: the card is not changed.

    Raises:
        UsageError: The folder has no finished model, a name is not valid, or there is no token.
        CheckpointError: The model is damaged, or the hub rejects the upload or cannot be reached.

    Example:
        >>> push("runs/first", "my-org/feedback", dry_run=True).files["config.json"]
    """
    folder = _model_folder(Path(model))
    try:
        validate_repo_id(repo)
        repo_is_name = repo.count("/") == 1
    except errors.HFValidationError:
        repo_is_name = False
    if not repo_is_name:
        raise UsageError(f"{repo}: expected OWNER/NAME, such as my-org/my-model")
    if not branch.strip() or not message.strip():
        raise UsageError("expected a branch and a message that are not empty")
    if languages is not None or licence is not None:
        run = folder.parent if folder.name == outputs.MODEL else folder
        write_card(run, languages=languages, licence=licence)
    files, left_out = _files_to_upload(folder)
    plan = Push(folder=folder, repo=repo, branch=branch, public=public, files=files, left_out=left_out)
    return plan if dry_run else _upload(plan, message)


def _model_folder(path: Path) -> Path:
    """Returns the folder of the model, after a check that the model can be loaded."""
    check_path(path)
    if not path.is_dir():
        problem = "this is a file. Expected the folder of a model or of a finished run"
        raise UsageError(f"{path}: {problem if path.exists() else missing_path(path, 'folder')}")
    if not (path / CONFIG).is_file():
        if (path / outputs.RUN).is_file() and outputs.read_summary(path) is None:
            raise UsageError(f"{path}: the run is not finished. Train it to its end, or push {path / outputs.MODEL}")
        path = model_folder(path)
    if not (path / CONFIG).is_file():
        raise UsageError(f"{path} has no config.json. Expected a folder that save_pretrained wrote")
    problems = inspect_checkpoint(path).problems
    if problems:
        raise CheckpointError(f"{path} cannot be loaded ({problems[0]})")
    return path


def _files_to_upload(folder: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """Returns the files to upload with their sizes, and the names of all others."""
    paths = [path for path in (*folder.iterdir(), *folder.glob("onnx/*")) if path.name != "onnx"]
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    names_to_upload = [
        name
        for name in names
        if is_model_file(name) or any(fnmatch.fnmatchcase(name, pattern) for pattern in _ACCOMPANYING)
    ]
    for name in names_to_upload:
        if (folder / name).is_symlink():
            raise UsageError(f"{folder / name} is a link. Push a copy of the folder (`cp -rL {folder} COPY`)")
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in PICKLES):
            raise UsageError(f"{folder / name} holds pickled weights. Load the model and save it with save_pretrained")
    files = {name: (folder / name).stat().st_size for name in names_to_upload if (folder / name).is_file()}
    return files, tuple(name for name in names if name not in files)


def _upload(plan: Push, message: str) -> Push:
    if constants.HF_HUB_OFFLINE:
        raise UsageError("HF_HUB_OFFLINE is set. Unset it to push, or use --dry-run")
    if get_token() is None:
        raise UsageError("there is no token. Run `hf auth login` with a token that may write, or set HF_TOKEN")
    api = HfApi(library_name="bert-tasks")
    with _hub_errors(plan):
        api.create_repo(plan.repo, private=not plan.public, exist_ok=True)
        if not plan.public and api.model_info(plan.repo).private is False:
            raise UsageError(f"{plan.repo} exists and is public. Pass --public to push to it, or choose another name")
        if plan.branch != _MAIN:
            api.create_branch(plan.repo, branch=plan.branch, exist_ok=True)
        operations = [CommitOperationAdd(name, plan.folder / name) for name in plan.files]
        commit = api.create_commit(plan.repo, operations, commit_message=message, revision=plan.branch)
    return replace(plan, url=str(commit.commit_url))


@contextmanager
def _hub_errors(plan: Push) -> Iterator[None]:
    """Turns errors of the hub and the network into a short ``CheckpointError``."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, LookupError, httpx.HTTPError) as error:
        refused = error if isinstance(error, errors.HfHubHTTPError) else error.__cause__
        status, hub = getattr(getattr(refused, "response", None), "status_code", None), masked(constants.ENDPOINT)
        if status is not None:
            reason = _REFUSALS.get(status, f"The hub ({hub}) answered {status}. Try again later")
        else:  # not the library's message, which may be long, or quote what was sent
            reason = (
                f"The upload to {hub} failed ({type(error).__name__}). Check the network and the proxy, then push "
                "again (HF_HUB_DISABLE_XET=1 sends files by plain HTTP)"
            )
        raise CheckpointError(f"{plan.repo}: bert_tasks published nothing. {reason}") from None

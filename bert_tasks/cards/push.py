"""Uploads a model folder to the Hugging Face Hub.

This module owns the choice of files, which are the model and its card and nothing else in the folder, and the error
messages. huggingface_hub handles the endpoint, the token and the transfer. A token never appears in a message.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants, errors, get_token
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP client
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported at run time only

from bert_tasks.cards.card import CARD, write_card
from bert_tasks.checkpoints.hub import CONFIG, PICKLES, REFUSED_TOKEN, is_model_file, model_folder
from bert_tasks.checkpoints.inspect import inspect_checkpoint
from bert_tasks.data.issues import counted, missing_path
from bert_tasks.environment import masked
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.storage import check_path
from bert_tasks.tables import Result
from bert_tasks.training import files as outputs

# Patterns of the files that are uploaded beside those of the model.
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
        files: The size in bytes of each file, by its name in the folder.
        left_out: The names of the other files in the folder, which are not uploaded.
        url: The address of the new commit. It is None before the upload and for a dry run.
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
    """Uploads a model folder to the Hugging Face Hub, in one commit.

    It uploads the weights, the configuration, the tokenizer, the card, exported ONNX models and licence texts, and
    nothing else of the folder. A check before the upload makes sure that the model can be loaded. Because all files are
    in one commit, readers of the repository never see half of a model. Call it with ``dry_run=True`` first to see the
    files and their sizes.

    Args:
        model: The folder of a model or of a finished run.
        repo: The repository as ``OWNER/NAME``. It is created if it does not exist.
        dry_run: True to only list the files, without contacting the hub. Default: False.
        public: True if a new repository is public, and an existing one may be. Default: False, so that a new repository
            is private, and a public one is rejected.
        branch: The branch of the repository, which is created if it does not exist. Default: main.
        message: The message of the commit.
        languages: Languages of the model. If they or the licence are given, the card of the run is written again first,
            as ``write_card`` does. Default: the card is not changed.
        licence: Licence of the model, in the same way.

    Returns:
        The files that were uploaded, those that were left out, and the address of the commit.

    Raises:
        UsageError: The folder has no finished model, a name is not valid, the repository is public and ``public`` is
            False, or there is no token.
        CheckpointError: The model is damaged, or the hub rejects the upload or cannot be reached.

    Examples:
        >>> plan = push("runs/first", "my-org/feedback", dry_run=True)
        >>> "config.json" in plan.files
        True
    """
    folder = _model_folder(Path(model))
    try:
        validate_repo_id(repo)
        has_owner = repo.count("/") == 1  # NAME alone is valid for huggingface_hub, too
    except errors.HFValidationError:
        has_owner = False
    if not has_owner:
        raise UsageError(f"{repo}: expected OWNER/NAME, such as my-org/my-model")
    if not branch.strip() or not message.strip():
        raise UsageError("expected a branch and a message that are not empty")
    if languages is not None or licence is not None:
        run = folder.parent if folder.name == outputs.MODEL else folder  # a card is written from the files of a run
        write_card(run, languages=languages, licence=licence)
    files, left_out = _files_to_upload(folder)
    plan = Push(folder=folder, repo=repo, branch=branch, public=public, files=files, left_out=left_out)
    if dry_run:
        return plan
    return _upload(plan, message)


def _model_folder(path: Path) -> Path:
    """Returns the folder of the model, after a check that the model can be loaded."""
    check_path(path)
    if not path.is_dir():
        if path.exists():
            problem = "this is a file. Expected the folder of a model or of a finished run"
        else:
            problem = missing_path(path, "folder")
        raise UsageError(f"{path}: {problem}")
    # The folder of a run has the model in a folder of its own.
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
    names_to_upload = [name for name in names if is_model_file(name) or _matches(name, _ACCOMPANYING)]
    # A file that must not be published is an error and not left out, because the model would lack it.
    files = {}
    for name in names_to_upload:
        path = folder / name
        # A link may lead to a file outside of the folder, which nobody meant to publish.
        if path.is_symlink():
            raise UsageError(f"{path} is a link. Push a copy of the folder (`cp -rL {folder} COPY`)")
        # Loading a pickle runs the code in it.
        if _matches(name, PICKLES):
            raise UsageError(f"{path} holds pickled weights. Load the model and save it with save_pretrained")
        if path.is_file():
            files[name] = path.stat().st_size
    return files, tuple(name for name in names if name not in files)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _upload(plan: Push, message: str) -> Push:
    """Makes the repository and the branch if they do not exist, and commits the files."""
    if constants.HF_HUB_OFFLINE:
        raise UsageError("HF_HUB_OFFLINE is set. Unset it to push, or use --dry-run")
    if get_token() is None:
        raise UsageError("there is no token. Run `hf auth login` with a token that may write, or set HF_TOKEN")
    api = HfApi(library_name="bert-tasks")
    with _hub_errors(plan):
        api.create_repo(plan.repo, private=not plan.public, exist_ok=True)
        # ``private`` has no effect on a repository that exists, which may be public.
        if not plan.public and api.model_info(plan.repo).private is False:
            raise UsageError(f"{plan.repo} exists and is public. Pass --public to push to it, or choose another name")
        if plan.branch != _MAIN:
            api.create_branch(plan.repo, branch=plan.branch, exist_ok=True)
        operations = [CommitOperationAdd(name, plan.folder / name) for name in plan.files]
        commit = api.create_commit(plan.repo, operations, commit_message=message, revision=plan.branch)
    return replace(plan, url=str(commit.commit_url))


@contextmanager
def _hub_errors(plan: Push) -> Iterator[None]:
    """Turns errors of the hub and of the network into a short ``CheckpointError``."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, LookupError, HTTPError) as error:
        # huggingface_hub raises some errors of its own "from" the error that has the response.
        refusal = error if isinstance(error, errors.HfHubHTTPError) else error.__cause__
        response = getattr(refusal, "response", None)
        status = getattr(response, "status_code", None)
        hub = masked(constants.ENDPOINT)  # an address may hold a name and a password
        if status is not None:
            reason = _REFUSALS.get(status, f"The hub ({hub}) answered {status}. Try again later")
        else:
            # The message of the library is not shown, because it may be long or quote what was sent.
            reason = (
                f"The upload to {hub} failed ({type(error).__name__}). Check the network and the proxy, then push "
                "again (HF_HUB_DISABLE_XET=1 sends files by plain HTTP)"
            )
        raise CheckpointError(f"{plan.repo}: bert_tasks published nothing. {reason}") from None

"""Owns what a small hub holds: repositories with commits, branches and tags, and who may see them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Stored as large files, which the hub serves from another address; all else is a git blob.
LARGE = (".safetensors", ".bin", ".parquet", ".onnx", ".zip")


def commit_of(repo: str) -> str:
    """The first commit of a repository."""
    return hashlib.sha1(repo.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file of a commit."""

    name: str
    content: bytes

    @property
    def is_large(self) -> bool:
        return self.name.endswith(LARGE)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def blob_id(self) -> str:
        """As git names it; of a large file the name of its pointer, which only needs to be one of its own."""
        header = f"blob {len(self.content)}\0".encode()
        return hashlib.sha1(self.sha256.encode() if self.is_large else header + self.content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_large else self.blob_id

    def entry(self) -> dict[str, object]:
        """As a listing tells it."""
        large = {"lfs": {"oid": self.sha256, "size": len(self.content), "pointerSize": 134}} if self.is_large else {}
        return {"type": "file", "path": self.name, "size": len(self.content), "oid": self.blob_id, **large}


@dataclass(kw_only=True)
class Repository:
    """``refs``: branch or tag -> commit; ``commits``: commit -> its files by name.

    ``private`` ones are seen with a token only; ``gated`` ones nobody may read.
    """

    repo_type: str
    name: str
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, StoredFile]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch, a tag or a commit."""
        return revision if revision in self.commits else self.refs.get(revision)

    def add(self, files: Mapping[str, bytes], *, branch: str = "main", message: str = "add files") -> str:
        """A commit on a branch with these files added to what was there."""
        before = self.commits[self.refs[branch]] if branch in self.refs else {}
        stored_files = {name: StoredFile(name=name, content=content) for name, content in files.items()}
        number = len(self.commits)
        commit = commit_of(self.name if number == 0 else f"{self.name} {number}")
        self.commits[commit] = {**before, **stored_files}
        self.refs[branch] = commit
        self.messages.append(message)
        return commit


def from_folder(repo_type: str, name: str, folder: Path) -> Repository:
    """A repository with one commit, which is branch ``main`` and tag ``v1``."""
    repository = Repository(repo_type=repo_type, name=name)
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    repository.refs["v1"] = repository.add(files)
    return repository

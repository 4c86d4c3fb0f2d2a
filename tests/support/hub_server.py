"""Owns a small hub on loopback that speaks to huggingface_hub and datasets, and the environment that points to it.

It answers what these clients ask for files, listings, new repositories and commits, with large files at an address of
their own and parts of them by Range. The environment is for a process of its own: huggingface_hub reads it at import.
"""

import base64
import json
import os
import re
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from support.hub_repositories import Repository, StoredFile, commit_of, from_folder

__all__ = ["HubServer", "commit_of"]

WRITER, READER = "hf_writer_0123456789", "hf_reader_0123456789"


class HubServer:
    """Serves folders (id -> folder) as models and data sets while entered.

    Each is a repository with branch ``main``, tag ``v1`` and one commit; ``repositories`` has them as ("model", id).
    ``gated`` ids answer that access is restricted, ``private`` ones are seen by the tokens WRITER and READER only.
    ``cuts``: of the next download of such a file name only so many bytes are sent.

    ``requests`` lists "METHOD path" of every request, in order; ``ranges`` (file name, Range) of those for a part.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        *,
        datasets: Mapping[str, Path] | None = None,
        gated: tuple[str, ...] = (),
        private: tuple[str, ...] = (),
    ) -> None:
        self.folders = dict(folders)
        kinds = {"model": self.folders, "dataset": {} if datasets is None else datasets}
        self.repositories = {
            (repo_type, name): from_folder(repo_type, name, path)
            for repo_type, paths in kinds.items()
            for name, path in paths.items()
        }
        for name in gated:
            self.repositories["model", name] = Repository(repo_type="model", name=name, gated=True)
        for (_, name), repository in self.repositories.items():
            repository.private = name in private
        self.uploaded: dict[str, bytes] = {}
        self.cuts: dict[str, int] = {}
        self.requests: list[str] = []
        self.ranges: list[tuple[str, str]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def large_files(self) -> str:
        """Where large files lie: another host to clients, which therefore get no token there."""
        return f"http://localhost:{self._http.server_port}/lfs"

    def environment(self, home: Path, *, offline: bool = False, token: str | None = None) -> dict[str, str]:
        """Of a process that knows this hub only and caches below ``home``."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
        hub = {"HF_HOME": str(home), "HF_ENDPOINT": self.endpoint, "HF_HUB_OFFLINE": str(int(offline))}
        hub |= {} if token is None else {"HF_TOKEN": token}
        return kept | hub | {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1,localhost"}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class RefusedError(Exception):
    """An answer other than 200."""

    def __init__(
        self, status: int, code: str = "", message: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        self.headers = {} if headers is None else dict(headers)
        self.headers |= {"X-Error-Code": code} if code else {}
        self.headers |= {"X-Error-Message": message} if message else {}


def _handler(server: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def do_PUT(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            self.body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            server.requests.append(f"{self.command} {path}")
            try:
                self.route(path)
            except RefusedError as refused:
                self.send(refused.status, b"{}", refused.headers)

        def route(self, path: str) -> None:
            if path == "/api/repos/create":
                self.create()
            elif path == "/api/validate-yaml":
                self.send_json({"errors": [], "warnings": []})
            elif match := re.fullmatch(r"/lfs/(\w+)", path):
                self.large_file(match[1])
            elif match := re.fullmatch(r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
                self.lfs_batch(match["repo"])
            elif match := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(.*))?", path):
                self.api(self.repository(match[1], match[2]), match[3])
            elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                repository = self.repository("dataset" if match[1] else "model", match[2])
                self.serve_file(repository, self.commit(repository, match[3]), match[4])
            else:
                raise RefusedError(404)

        def repository(self, repo_type: str, name: str) -> Repository:
            """The repository, if the caller may see it; the answers to others are the hub's."""
            repository, token = server.repositories.get((repo_type, name)), self.token()
            if repository is not None and repository.gated:
                raise RefusedError(403, "GatedRepo")
            if repository is None or (repository.private and token is None):
                raise RefusedError(404 if token else 401, "RepoNotFound")
            return repository

        def token(self) -> str | None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if token and token not in (WRITER, READER):
                raise RefusedError(401, message="Invalid credentials in Authorization header")
            return token if token else None

        def must_write(self) -> None:
            token = self.token()
            if token != WRITER:
                raise RefusedError(403 if token else 401, message="this token has no write permission")

        def commit(self, repository: Repository, revision: str) -> str:
            commit = repository.resolve(revision)
            if commit is None:
                raise RefusedError(404, "RevisionNotFound")
            return commit

        def api(self, repository: Repository, rest: str | None) -> None:
            action, _, tail = ("revision/main" if rest is None else rest).partition("/")
            match self.command, action:
                case "GET" | "HEAD", "revision":
                    self.describe(repository, self.commit(repository, tail))
                case "GET", "tree":
                    revision, _, folder = tail.partition("/")
                    self.listing(repository.commits[self.commit(repository, revision)], folder)
                case "POST", "paths-info":
                    self.paths_info(repository.commits[self.commit(repository, tail)])
                case "POST", "preupload":
                    self.must_write()
                    self.upload_modes(repository, self.commit(repository, tail))
                case "POST", "commit":
                    self.must_write()
                    self.take_commit(repository, tail)
                case "POST", "branch":
                    self.must_write()
                    if tail in repository.refs:
                        raise RefusedError(409)
                    repository.refs[tail] = repository.refs["main"]
                    self.send_json({})
                case _:
                    raise RefusedError(404)

        def describe(self, repository: Repository, commit: str) -> None:
            names = [{"rfilename": name} for name in repository.commits[commit]]
            info = {"id": repository.name, "modelId": repository.name, "sha": commit, "private": repository.private}
            self.send_json({**info, "tags": [], "siblings": names})

        def listing(self, files: Mapping[str, StoredFile], folder: str) -> None:
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
            prefix = f"{folder}/" if folder else ""
            inside = {name: file for name, file in files.items() if name.startswith(prefix)}
            if folder and not inside:
                raise RefusedError(404, "EntryNotFound")
            entries = [f.entry() for n, f in inside.items() if recursive or "/" not in n.removeprefix(prefix)]
            folders = {prefix + name.removeprefix(prefix).split("/")[0] for name in inside}
            parents = {path for path in folders if path not in files}
            entries += [{"type": "directory", "path": path, "oid": commit_of(path)} for path in sorted(parents)]
            self.send_json(entries)

        def paths_info(self, files: Mapping[str, StoredFile]) -> None:
            asked = parse_qs(self.body.decode()).get("paths", [])
            entries = [files[path].entry() for path in asked if path in files]
            folders = [path for path in asked if any(name.startswith(f"{path}/") for name in files)]
            self.send_json(entries + [{"type": "directory", "path": path, "oid": commit_of(path)} for path in folders])

        def serve_file(self, repository: Repository, commit: str, name: str) -> None:
            headers = {"X-Repo-Commit": commit}
            file = repository.commits[commit].get(name)
            if file is None:
                raise RefusedError(404, "EntryNotFound", headers=headers)
            if not file.is_large:
                self.send(200, file.content, {**headers, "ETag": f'"{file.etag}"'})
                return
            server.uploaded.setdefault(file.sha256, file.content)
            headers |= {"X-Linked-ETag": f'"{file.etag}"', "X-Linked-Size": str(len(file.content))}
            self.send(302, b"", {**headers, "Location": f"{server.large_files}/{file.sha256}?{name}"})

        def large_file(self, oid: str) -> None:
            if self.command == "PUT":
                server.uploaded[oid] = self.body
                self.send(200, b"", {})
                return
            name, content = urlsplit(self.path).query, server.uploaded[oid]
            byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if byte_range is None:
                self.send(200, content, {"Accept-Ranges": "bytes"}, cut=server.cuts.pop(name, None))
                return
            server.ranges.append((name, byte_range[0]))
            first, last = int(byte_range[1]), int(byte_range[2]) + 1 if byte_range[2] else len(content)
            span = f"bytes {first}-{last - 1}/{len(content)}"
            self.send(206, content[first:last], {"Content-Range": span})

        def create(self) -> None:
            self.must_write()
            asked = json.loads(self.body)
            name = f"{asked.get('organization', 'org')}/{asked['name']}"
            if name.startswith("other/"):
                raise RefusedError(403, message="You don't have the rights to create a model under this namespace")
            if ("model", name) in server.repositories:
                self.send(409, json.dumps({"url": f"{server.endpoint}/{name}"}).encode(), {})
                return
            is_private = asked.get("private", asked.get("visibility") == "private")  # before version 2 the first one
            repository = Repository(repo_type="model", name=name, private=is_private)
            repository.add({".gitattributes": b""}, message="initial commit")
            server.repositories["model", name] = repository
            self.send_json({"url": f"{server.endpoint}/{name}"})

        def upload_modes(self, repository: Repository, commit: str) -> None:
            files = [StoredFile(name=asked["path"], content=b"") for asked in json.loads(self.body)["files"]]
            stored_files = repository.commits[commit]
            answers = [
                {
                    "path": file.name,
                    "uploadMode": "lfs" if file.is_large else "regular",
                    "shouldIgnore": False,
                    "oid": stored_files[file.name].etag if file.name in stored_files else None,
                }
                for file in files
            ]
            self.send_json({"files": answers})

        def lfs_batch(self, name: str) -> None:
            self.must_write()
            self.repository("model", name)
            objects: list[dict[str, Any]] = json.loads(self.body)["objects"]
            for item in objects:
                if item["oid"] not in server.uploaded:
                    item["actions"] = {"upload": {"href": f"{server.large_files}/{item['oid']}"}}
            self.send_json({"transfer": "basic", "objects": objects})

        def take_commit(self, repository: Repository, branch: str) -> None:
            files, message = {}, ""
            for line in self.body.splitlines():
                item = json.loads(line)
                value = item["value"]
                match item["key"]:
                    case "header":
                        message = value["summary"]
                    case "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    case "lfsFile":
                        files[value["path"]] = server.uploaded[value["oid"]]
            oid = repository.add(files, branch=branch, message=message)
            self.send_json({"commitUrl": f"{server.endpoint}/{repository.name}/commit/{oid}", "commitOid": oid})

        def send_json(self, content: object) -> None:
            self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def send(self, status: int, body: bytes, headers: Mapping[str, str], *, cut: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True

    return Handler

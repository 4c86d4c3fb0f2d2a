"""Owns a small hub on loopback that serves folders to huggingface_hub, and the environment that points to it.

The environment is for a process of its own: huggingface_hub reads it at import.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit


def commit_of(repo: str) -> str:
    """The only commit of a repository."""
    return hashlib.sha1(repo.encode()).hexdigest()


class HubServer:
    """Serves ``folders`` (model id -> folder) with branch ``main``, tag ``v1`` and one commit, while entered.

    ``gated`` ids answer that access is restricted. ``requests`` lists "METHOD path" of every request, in order.
    """

    def __init__(self, folders: Mapping[str, Path], *, gated: tuple[str, ...] = ()) -> None:
        self.folders = dict(folders)
        self.gated = gated
        self.requests: list[str] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def environment(self, home: Path, *, offline: bool = False) -> dict[str, str]:
        """Of a process that knows this hub only and caches below ``home``."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
        hub = {"HF_HOME": str(home), "HF_ENDPOINT": self.endpoint, "HF_HUB_OFFLINE": str(int(offline))}
        return kept | hub | {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _handler(server: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            server.requests.append(f"{self.command} {path}")
            parts = path.strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            repo, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
            if repo in server.gated:
                self.send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            elif repo not in server.folders:
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif rest and rest[1] not in ("main", "v1", commit_of(repo)):
                self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            elif api:
                self.describe(repo, rest[0] if rest else "revision")
            else:
                self.serve_file(repo, "/".join(rest[2:]))

        def describe(self, repo: str, what: str) -> None:
            folder = server.folders[repo]
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            names = [file.relative_to(folder).as_posix() for file in files]
            info = {"id": repo, "modelId": repo, "sha": commit_of(repo), "private": False, "tags": []}
            tree = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": content_hash(file)}
                for name, file in zip(names, files, strict=True)
            ]
            answer = tree if what == "tree" else info | {"siblings": [{"rfilename": name} for name in names]}
            self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def serve_file(self, repo: str, name: str) -> None:
            file = server.folders[repo] / name
            commit = {"X-Repo-Commit": commit_of(repo)}
            if not file.is_file():
                self.send(404, b"", {"X-Error-Code": "EntryNotFound", **commit})
                return
            self.send(200, file.read_bytes(), {"ETag": f'"{content_hash(file)}"', **commit})

        def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


def content_hash(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()

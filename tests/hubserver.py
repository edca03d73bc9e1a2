"""A hub on loopback that speaks what huggingface-hub asks for, and fails in chosen ways.

Two servers on ports of their own, as on the real one: the hub answers with a redirect to the
content, which lies on another host.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Request:
    """What a server was asked. place: "hub" or "content"."""

    place: str
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Faults:
    """What goes wrong from now on."""

    status: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)  # by place
    cuts: int = 0  # how many more contents break off
    resumable: bool = True  # whether a content can be asked for from its middle
    stall: threading.Event | None = None  # a content stops in its middle until this is set
    garble: Callable[[bytes], bytes] = bytes  # what a content is turned into
    etags: Iterator[str] | None = None  # what the hub says the checksums of contents are
    claimed_size: int | None = None  # what the hub says of every size
    login_page: bool = False  # somebody else answers in the hub's place
    moves: Callable[[], None] | None = None  # what happens after the next answer of the hub


class HubServer:
    """Repositories with files; `files[repo][file]` can be changed while it runs."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.faults = Faults()
        self.requests: list[Request] = []
        self._commits: dict[str, dict[str, bytes]] = {}
        self._servers = {place: self._server(place) for place in ("hub", "content")}

    def close(self) -> None:
        if self.faults.stall is not None:
            self.faults.stall.set()
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    @property
    def endpoint(self) -> str:
        return self._url("hub")

    def commit(self, repo: str) -> str:
        """The newest commit, which changes with every file; older ones stay."""
        content = repr(sorted(self.files[repo].items())).encode()
        commit = hashlib.sha1(content).hexdigest()
        self._commits[commit] = dict(self.files[repo])
        return commit

    def asked(self, place: str, method: str = "GET") -> list[Request]:
        """The requests so far of one kind."""
        return [each for each in self.requests if (each.place, each.method) == (place, method)]

    def _url(self, place: str) -> str:
        return f"http://127.0.0.1:{self._servers[place].server_port}"

    def _server(self, place: str) -> ThreadingHTTPServer:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer()

            def do_GET(self) -> None:
                self.answer()

            def answer(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.requests.append(Request(place, self.command, self.path, headers))
                try:
                    if place == "hub":
                        outer._hub(self)
                    else:
                        outer._content(self)
                except (BrokenPipeError, ConnectionResetError):
                    pass

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    # --- the hub -------------------------------------------------------------------------------

    def _hub(self, request: BaseHTTPRequestHandler) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path)
        if self.faults.login_page:
            _send(request, 200, {"Content-Type": "text/html"}, b"<html>please log in</html>")
        elif "hub" in self.faults.status:
            _send(request, *self.faults.status["hub"], b"")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path):
            self._tree(request, found[1])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(request, *found.groups())
        else:
            _send(request, 404, {}, b"")

    def _tree(self, request: BaseHTTPRequestHandler, repo: str) -> None:
        if repo not in self.files:
            _send(request, 404, {"X-Error-Code": "RepoNotFound"}, b"")
            return
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": _git_sha1(data)}
            for name, data in self.files[repo].items()
        ]
        _send(request, 200, {"Content-Type": "application/json"}, json.dumps(entries).encode())

    def _resolve(
        self, request: BaseHTTPRequestHandler, repo: str, revision: str, name: str
    ) -> None:
        if repo not in self.files:
            code = 404 if request.headers.get("Authorization") else 401
            _send(request, code, {"X-Error-Code": "RepoNotFound"}, b"")
            return
        commit = self.commit(repo) if revision in ("main", "v1") else revision
        if self.faults.moves is not None:
            move, self.faults.moves = self.faults.moves, None
            move()
        files = self._commits.get(commit)
        if files is None:
            _send(request, 404, {"X-Error-Code": "RevisionNotFound"}, b"")
            return
        if name not in files:
            missing = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            _send(request, 404, missing, b"")
            return
        data = files[name]
        if not name.endswith(".gguf"):  # kept in Git, with the checksum of Git
            _send(request, 200, {"X-Repo-Commit": commit, "ETag": f'"{_git_sha1(data)}"'}, data)
            return
        etag = hashlib.sha256(data).hexdigest()
        if self.faults.etags is not None:
            etag = next(self.faults.etags)
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{etag}"',
            "X-Linked-Size": str(self.faults.claimed_size or len(data)),
            "Location": f"{self._url('content')}/{hashlib.sha256(data).hexdigest()}",
        }
        _send(request, 302, headers, b"")

    # --- the contents --------------------------------------------------------------------------

    def _content(self, request: BaseHTTPRequestHandler) -> None:
        if "content" in self.faults.status:
            _send(request, *self.faults.status["content"], b"")
            return
        kept = (*self.files.values(), *self._commits.values())
        contents = (data for files in kept for data in files.values())
        wanted = request.path.lstrip("/")
        data = next(data for data in contents if hashlib.sha256(data).hexdigest() == wanted)
        data = self.faults.garble(data)
        begin, end = 0, len(data)
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        if asked and self.faults.resumable:
            begin = int(asked[1])
        request.send_response(206 if begin else 200)
        request.send_header("Content-Length", str(end - begin))
        if begin:
            request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{end}")
        request.end_headers()
        middle = begin + (end - begin) * 2 // 5
        request.wfile.write(data[begin:middle])
        request.wfile.flush()
        if self.faults.cuts:
            self.faults.cuts -= 1
            return
        if self.faults.stall is not None:
            self.faults.stall.wait(60)
        request.wfile.write(data[middle:])


def point_at(server: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point huggingface-hub in this process at a server, with its cache and ours in a folder.

    It reads its variables once, when it is imported.
    """
    from huggingface_hub import constants

    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in variables(server, folder).items():
        monkeypatch.setenv(name, value)


def variables(server: HubServer, folder: Path) -> dict[str, str]:
    """The same for a process of its own."""
    return {
        "HF_ENDPOINT": server.endpoint,
        "HF_HOME": str(folder / "hf"),
        "SPECLLAMA_CONFIG": str(folder / "config"),
        "NO_PROXY": "127.0.0.1",
    }


def _send(
    request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes
) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

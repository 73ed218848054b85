"""A small Hub on this machine: enough of its API for the real client to download, be refused, or be cut off."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted."}
MISSING = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}


@dataclass
class StubHub:
    """Repositories by id, and what goes wrong; `requests` holds what was asked for.

    A file in `cut` breaks off once, after so many bytes; the Hub stays down then if `is_down_after_cut`.
    """

    repos: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    is_down_after_cut: bool = False
    status: int = 200
    good_token: str | None = None
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StubHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests read `requests`."""

    def _answer(self, *, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if hub.status != 200:
            return self._send(hub.status, {}, b"down")
        if token and token != hub.good_token:
            return self._send(401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"")
        parts = path.strip("/").removeprefix("datasets/").split("/")
        is_api = parts[:2] in (["api", "models"], ["api", "datasets"])
        repo_id, rest = "/".join(parts[2:4] if is_api else parts[:2]), parts[4:] if is_api else parts[2:]
        if repo_id not in hub.repos:
            return self._send(401 if not token else 404, MISSING, b"")
        if rest[:1] in (["revision"], ["tree"], ["resolve"]) and rest[1] not in ("main", COMMIT):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"")
        files = hub.repos[repo_id]
        if not is_api:
            return self._file(files, repo_id, "/".join(rest[2:]), body=body)
        names = [
            {
                "type": "file",
                "path": name,
                "rfilename": name,
                "size": hub.sizes.get(name, len(content)),
                "oid": _etag(content),
            }
            for name, content in files.items()
        ]
        answer = names if rest[:1] == ["tree"] else {"id": repo_id, "sha": COMMIT, "siblings": names}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _file(self, files: dict[str, bytes], repo_id: str, name: str, *, body: bool) -> None:
        if repo_id in self.hub.gated:
            return self._send(401, GATED, b"")
        if name not in files:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b"")
        content = files[name]
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(
            206 if start else 200,
            headers,
            content[start:],
            body=body,
            cut=self.hub.cut.pop(name, None) if body else None,
        )

    def _send(
        self, status: int, headers: dict[str, str], content: bytes, *, body: bool = True, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command == "GET":
            self.wfile.write(content[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            if self.hub.is_down_after_cut:
                time.sleep(0.5)  # the small files come meanwhile, in other threads
                self.hub.status = 503


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serve(hub: StubHub) -> Iterator[StubHub]:
    """Serves `hub` on a free port of this machine; `hub.url` is its address."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

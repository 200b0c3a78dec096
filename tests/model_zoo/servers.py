# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A local server: plain files, and the endpoints of the Hugging Face hub that its client calls."""

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class Served:
    """What the server holds and what it was asked for; the token of its account is "mine".

    Attributes:
        files: content by path.
        repositories: of the hub by name, their files by path.
        private: whether each repository is.
        messages: of the commits.
        uploaded: large files by SHA-256.
        gets: paths that were downloaded.
        delay: seconds before each answer.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    uploaded: dict[str, bytes] = field(default_factory=dict)
    gets: list[str] = field(default_factory=list)
    delay: float = 0.0
    url: str = ""


@contextmanager
def serve() -> Iterator[Served]:
    """Serves until the end of the block."""
    served = Served()

    class Handler(_Handler):
        state = served

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: Served

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        time.sleep(self.state.delay)
        if self.command == "GET":
            self.state.gets.append(self.path)
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
        files = self.state.repositories.get(match[1]) if match else self.state.files
        path = match[3] if match else self.path.lstrip("/")
        if files is None:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif path not in files:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            etag = f'"{hashlib.sha256(files[path]).hexdigest()}"'
            self._answer(200, files[path], {"ETag": etag, "X-Repo-Commit": COMMIT})

    def do_POST(self) -> None:
        body = self._read()
        if self.headers.get("Authorization") != "Bearer mine":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            modes = [_choose_mode(file["path"]) for file in json.loads(body)["files"]]
            self._answer(200, {"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.state.url}/upload/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        else:
            assert "/commit/" in self.path
            self._commit([json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        content = self._read()
        self.state.uploaded[hashlib.sha256(content).hexdigest()] = content
        self._answer(200, {})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        status = 409 if name in self.state.repositories else 200
        self.state.repositories.setdefault(name, {})
        is_private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.state.private.setdefault(name, is_private)
        self._answer(status, {"url": f"{self.state.url}/{name}", "name": name, "id": name})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        name = "/".join(self.path.split("/")[3:5])
        files = self.state.repositories[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.state.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.state.uploaded[value["oid"]]
        url = f"{self.state.url}/{name}/commit/{COMMIT}"
        self._answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})

    def _read(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(
        self, status: int, content: bytes | dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _choose_mode(path: str) -> dict[str, Any]:
    large = path.endswith(".safetensors")
    return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

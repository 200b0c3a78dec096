# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The few endpoints of the Hugging Face hub that its client calls to write and to read files."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class Hub:
    """A hub with one account, whose token is "mine".

    Attributes:
        repositories: by name, their files by path.
        messages: of the commits, in order.
        private: whether each repository is.
        uploaded: large files by SHA-256.
        url: address.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    private: dict[str, bool] = field(default_factory=dict)
    uploaded: dict[str, bytes] = field(default_factory=dict)
    url: str = ""


@contextmanager
def run_hub() -> Iterator[Hub]:
    """Runs a hub on this machine until the end of the block."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self._body()
        if self.headers.get("Authorization") != "Bearer mine":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            self._answer(200, {"files": [_mode(one["path"]) for one in asked]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            asked = json.loads(body)["objects"]
            self._answer(200, {"transfer": "basic", "objects": [self._upload(o) for o in asked]})
        elif "/commit/" in self.path:
            self._commit([json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, {"error": "not part of the stand-in"})

    def do_PUT(self) -> None:
        content = self._body()
        assert self.path == f"/upload/{hashlib.sha256(content).hexdigest()}"
        self.state.uploaded[self.path.rpartition("/")[2]] = content
        self._answer(200, {})

    def do_GET(self) -> None:
        self._resolve(with_body=True)

    def do_HEAD(self) -> None:
        self._resolve(with_body=False)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        status = 409 if name in self.state.repositories else 200
        self.state.repositories.setdefault(name, {})
        self.state.private.setdefault(name, asked.get("visibility") == "private"
                                      or bool(asked.get("private")))  # fmt: skip
        self._answer(status, {"url": f"{self.state.url}/{name}", "name": name, "id": name})

    def _upload(self, asked: dict[str, Any]) -> dict[str, Any]:
        address = f"{self.state.url}/upload/{asked['oid']}"
        return {**asked, "actions": {"upload": {"href": address}}}

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

    def _resolve(self, *, with_body: bool) -> None:
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
        files = self.state.repositories.get(match[1]) if match else None
        if match is None or files is None:
            self._answer(404, {}, {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        elif match[3] not in files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
            self._answer(404, {}, headers, with_body=with_body)
        else:
            content = files[match[3]]
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            headers = {"ETag": etag, "X-Repo-Commit": COMMIT}
            self._answer(200, content, headers, with_body=with_body)

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(
        self,
        status: int,
        content: bytes | dict[str, Any],
        headers: dict[str, str] | None = None,
        *,
        with_body: bool = True,
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _mode(path: str) -> dict[str, Any]:
    large = path.endswith(".safetensors")
    return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

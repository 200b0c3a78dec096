# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A local server of files, and of repositories as the Hugging Face hub serves them."""

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class Served:
    """Content by path, repositories of the hub by name, and the paths that were downloaded."""

    files: dict[str, bytes] = field(default_factory=dict)
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gets: list[str] = field(default_factory=list)
    delay: float = 0.0  # seconds before each answer
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
        content, headers = b"", {"X-Repo-Commit": COMMIT}
        if files is None:
            headers = {"X-Error-Code": "RepoNotFound"}
        elif path not in files:
            headers["X-Error-Code"] = "EntryNotFound"
        else:
            content = files[path]
            headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        self.send_response(404 if "X-Error-Code" in headers else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Servers of files on this machine, as good and as bad as those of the world."""

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Served:
    """What a server has and does, and what it was asked for.

    Attributes:
        files: content by path, without the leading slash.
        has_ranges: whether it can send parts of a file.
        has_validator: whether it names versions of files.
        weak: whether the version's name is a weak one.
        cuts: after how many bytes it hangs up, at each request in turn; None or none left: never.
        delay: seconds before each answer.
        requests: method, path, Range and If-Range of each request.
        bytes_sent: of contents.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    has_ranges: bool = True
    has_validator: bool = True
    weak: bool = False
    cuts: list[int | None] = field(default_factory=list)
    delay: float = 0.0
    requests: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    bytes_sent: int = 0
    url: str = ""

    @property
    def num_gets(self) -> int:
        return sum(method == "GET" for method, *_ in self.requests)


@contextmanager
def serve(served: Served) -> Iterator[Served]:
    """Serves until the end of the block; ``served.url`` is the address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            _answer(self, served)

        def do_GET(self) -> None:
            _answer(self, served)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


def _answer(handler: BaseHTTPRequestHandler, served: Served) -> None:
    path = handler.path.lstrip("/")
    wanted, version = handler.headers.get("Range"), handler.headers.get("If-Range")
    served.requests.append((handler.command, path, wanted, version))
    time.sleep(served.delay)
    if path not in served.files:
        handler.send_error(404)
        return
    content = served.files[path]
    etag = f'"{hashlib.sha1(content).hexdigest()}"'
    start = 0
    if served.has_ranges and wanted and version in (None, etag):
        (number,) = re.findall(r"bytes=(\d+)-", wanted)
        start = int(number)
        if start >= len(content):
            handler.send_error(416)
            return
    handler.send_response(206 if start else 200)
    if start:
        handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    handler.send_header("Content-Length", str(len(content) - start))
    if served.has_validator:
        handler.send_header("ETag", f"W/{etag}" if served.weak else etag)
    handler.send_header("X-Repo-Commit", "c0ffee" * 6 + "c0ff")  # what the hub's client asks for
    handler.end_headers()
    if handler.command == "HEAD":
        return
    cut = served.cuts.pop(0) if served.cuts else None
    body = content[start:][:cut]
    served.bytes_sent += len(body)
    with suppress(ConnectionError):  # whoever asked may have had enough
        handler.wfile.write(body)

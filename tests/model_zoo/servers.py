# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A local server of files."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Served:
    """Content by name of the file, and the paths that were downloaded."""

    files: dict[str, bytes] = field(default_factory=dict)
    gets: list[str] = field(default_factory=list)
    delay: float = 0.0  # seconds before each answer
    url: str = ""


@contextmanager
def serve() -> Iterator[Served]:
    """Serves until the end of the block."""
    served = Served()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            time.sleep(served.delay)
            served.gets.append(self.path)
            content = served.files.get(self.path.lstrip("/"))
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()

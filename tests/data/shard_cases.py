# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Small shards, and a web server on loopback that answers badly when it is told to."""

import functools
import http.server
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from qbheat_det.data import ToySpec, open_images, open_source, pack_source, prepare_toy_set

from .pictures import draw, save

SHARD = 8_000  # bytes, so that a dozen images fill several


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder.

    Attributes:
        faults: "503", "stall" or "cut", by the end of a path, each for one answer.
        asked: names of the files that were asked for, in order.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder)))
        self.faults: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.closing = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        self.server.asked.append(name)
        faults = self.server.faults.get(name) or self.server.faults.get("*") or []
        fault = faults.pop(0) if faults else ""
        if fault == "503":
            self.send_error(503)
        elif fault:
            content = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            if fault == "stall":
                self.server.closing.wait(3)
        else:
            super().do_GET()

    def end_headers(self) -> None:
        self.send_header("ETag", '"1"')  # as buckets have it
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Serves a folder in a thread."""
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()


def make_source(kind: str, root: Path) -> tuple[str, str]:
    """Makes twelve images; returns what ``--data`` and ``--images`` name."""
    if kind == "boxes":
        data = Path(prepare_toy_set(ToySpec(name="tiny", num_images=12, image_size=64), root))
        return str(data / "annotations.json"), str(data / "images")
    for index in range(12):
        folder = root / kind / "abc"[index % 3]
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{index:02d} ä.{'png' if index == 5 else 'jpg'}"
        save(folder / name, draw(60 + index, 50, seed=index))
    return (str(root / kind), "") if kind == "classes" else ("", str(root / kind))


def pack(kind: str, root: Path) -> Path:
    """Packs ``make_source``; returns the folder of the shards."""
    data, images = make_source(kind, root)
    source = open_source(data, images) if data else open_images([images])
    assert not pack_source(source, root / f"{kind}_shards", shard_bytes=SHARD)
    assert len([*(root / f"{kind}_shards").glob("*.tar")]) >= 3
    return root / f"{kind}_shards"


def corrupt(path: Path, *, at: float = 0.5) -> None:
    """Changes some bytes of a file, of which none is lost."""
    content = np.fromfile(path, np.uint8)
    place = int(at * len(content))
    content[place : place + 2000] ^= 255
    content.tofile(path)


def put(address: str, content: bytes) -> None:
    """Writes a file to a server of buckets, once it answers."""
    request = urllib.request.Request(
        address, content, {"Content-Type": "application/octet-stream"}, method="PUT"
    )
    end = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(request, timeout=10).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)

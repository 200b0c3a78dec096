# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images per second of the training stream: from a folder, from local shards, and over HTTP.

JPEGs of 640 x 480 pixels are cropped and resized to 256 pixels as in pre-training, in this process
and with two workers. The HTTP server is a process on the same machine, so the rates do not include
a network. Every round starts with an empty cache.
"""

import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.timing import PairedResult, Result, set_threads
from qbheat_det.config import get_cfg
from qbheat_det.data import build_train_stream, open_images, pack_source, register_source

_BATCH = 32


def run(*, quick: bool, threads: int = 2, rounds: int | None = None) -> list[Result]:
    """Measures all three sources in turns; returns rows that compare shards with the folder."""
    set_threads(threads)
    count, size, rounds = (64, (64, 48), 1) if quick else (1536, (640, 480), rounds or 3)
    rates: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        draw_photographs(root / "images", count, size)
        pack_source(open_images([str(root / "images")]), root / "shards", shard_bytes=8e6)
        with _serve(root / "shards") as address:
            places = {"folder": str(root / "images"), "shards": str(root / "shards")}
            places["http"] = address
            for number in range(rounds):
                for (place, path), workers in itertools.product(places.items(), (0, 2)):
                    os.environ["QBHEAT_CACHE"] = str(root / f"cache_{number}_{place}_{workers}")
                    rate = _measure(path, workers, images=min(count, 768))
                    rates.setdefault((place, workers), []).append(rate)
    return [
        PairedResult.higher_is_better(
            f"shards/{place}_{workers}_workers_vs_folder", values, rates["folder", workers], "img/s"
        )
        for (place, workers), values in rates.items()
        if place != "folder"
    ]


def _measure(path: str, workers: int, *, images: int) -> float:
    """Returns images per second, measured from the request of the first batch."""
    cfg = get_cfg()
    cfg.INPUT.DATASET_MAPPER_NAME = "pretrain"
    cfg.INPUT.PRETRAIN.MEMORY_GB = 0.0
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = False
    cfg.DATALOADER.SHUFFLE_SHARDS = 4
    cfg.SOLVER.IMS_PER_BATCH = _BATCH
    cfg.DATASETS.TRAIN = ("shards_benchmark",)
    register_source("shards_benchmark", open_images([path]).train)
    stream = iter(build_train_stream(cfg))
    start = time.perf_counter()
    for _ in range(images // _BATCH):
        next(stream)
    return images / (time.perf_counter() - start)


def draw_photographs(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Writes JPEGs with as much detail as photographs, about 60 kB each at 640 x 480."""
    folder.mkdir()
    for index in range(count):
        generator = np.random.default_rng(index)
        small = generator.integers(0, 255, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
        Image.fromarray(small).resize(size).save(folder / f"{index:06d}.jpg", quality=85)


@contextmanager
def _serve(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "http.server", str(port), "-b", "127.0.0.1", "-d", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(100):
                try:
                    urllib.request.urlopen(address, timeout=5).close()
                    break
                except urllib.error.URLError:
                    time.sleep(0.1)
            yield address
        finally:
            server.terminate()

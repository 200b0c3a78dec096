# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Computes one feature vector per image, and keeps the vectors in a cache on disk."""

import itertools
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from qbheat_det.checkpoint import local_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import get_cache_dir, hash_file
from qbheat_det.data import DataError, PretrainingMapper
from qbheat_det.inference.encoder import encode, locate_weights, open_encoder
from qbheat_det.probing import find_feature

_BATCH = 16
_ROWS = 500  # per question to the database


class Embeddings(NamedTuple):
    """Feature vectors (N, D) of the files that can be read, and the reasons for the others."""

    files: list[str]
    vectors: Tensor
    unreadable: dict[str, str]


def embed_images(
    files: Sequence[str],
    encoder: str = "distill/285M",
    *,
    size: int = 0,
    device: str | None = None,
    cache_folder: Path | None = None,
) -> Embeddings:
    """Returns the mean of an encoder's feature map for each image.

    A vector in the cache is used again if path, size and time of change of the file are the same.
    An interrupted call loses at most one batch.

    Args:
        files: paths of images.
        encoder: weights of an encoder, as ``qbheat_det.load`` takes them.
        size: side in pixels of the central square that the encoder sees; 0 for the size of its
            pre-training.
        device: "cpu" or "cuda"; by default cuda where there is a GPU.
        cache_folder: folder of the cache; by default below the package's cache folder.

    Raises:
        UserError: the weights are not an encoder's, or no image can be read.
    """
    name = locate_weights(encoder)
    model, cfg = open_encoder(name, device)
    feature, size = find_feature(model), size or cfg.INPUT.PRETRAIN.SIZE
    mapper = PretrainingMapper(size=size, is_train=False)
    unreadable: dict[str, str] = {}

    def compute(paths: Sequence[str]) -> dict[str, Tensor]:
        images, kept = [], []
        for path in paths:
            entry = mapper({"file_name": path, "label": 0})
            if isinstance(entry, DataError):
                unreadable[path] = entry.reason
            else:
                images.append(entry["image"].permute(1, 2, 0).numpy())
                kept.append(path)
        if not images:
            return {}
        vectors = encode(model, cfg, images)[feature].mean(dim=(2, 3)).half().cpu()
        return dict(zip(kept, vectors, strict=True))

    file = local_weights(name)
    identity = hash_file(file)[:16] if Path(file).is_file() else name.replace("/", "_")
    folder = cache_folder or get_cache_dir() / "embeddings"
    with closing(_Cache(folder / f"{identity}_{feature}_{size}.sqlite")) as cache:
        found = cache.read(files)
        missing = [path for path in dict.fromkeys(files) if path not in found]
        with tqdm(total=len(missing), unit="image", desc="embedding", disable=None) as bar:
            for batch in _cut(missing, _BATCH):
                computed = compute(batch)
                cache.write(computed)
                found.update(computed)
                bar.update(len(batch))
    kept = [path for path in files if path in found]
    if not kept:
        reason = next(iter(unreadable.items()), ("", "there are none"))
        raise UserError(f"none of the {len(files)} images can be read ('{reason[0]}': {reason[1]})")
    return Embeddings(kept, torch.stack([found[path] for path in kept]).float(), unreadable)


class _Cache:
    """Vectors by file in an SQLite database, which several processes may use at a time."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=60)
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS vectors (key TEXT PRIMARY KEY, value)"
            )
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"the cache '{path}' cannot be opened ({error}): remove it, or set $QBHEAT_CACHE"
            ) from error

    def read(self, files: Sequence[str]) -> dict[str, Tensor]:
        """Returns the vectors that are there, by path."""
        keys = {_key(path): path for path in files}
        found = {}
        for part in _cut(list(keys), _ROWS):
            marks = ",".join("?" * len(part))
            rows = self._database.execute(
                f"SELECT key, value FROM vectors WHERE key IN ({marks})", part
            )
            for key, value in rows:
                found[keys[key]] = torch.from_numpy(np.frombuffer(value, dtype=np.float16).copy())
        return found

    def write(self, vectors: dict[str, Tensor]) -> None:
        """Adds vectors by path."""
        rows = [(_key(path), vector.numpy().tobytes()) for path, vector in vectors.items()]
        with self._database:  # one transaction
            self._database.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)

    def close(self) -> None:
        self._database.close()


def _key(path: str) -> str:
    try:
        state = os.stat(path)
    except OSError:  # the mapper reports it
        return f"{os.path.abspath(path)}|missing"
    return f"{os.path.abspath(path)}|{state.st_size}|{state.st_mtime_ns}"


def _cut(items: Sequence[str], size: int) -> Iterator[list[str]]:
    iterator = iter(items)
    while part := list(itertools.islice(iterator, size)):
        yield part

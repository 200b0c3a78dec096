# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Computes the feature vectors of images with an encoder, and caches them on disk."""

import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from qbheat_det.checkpoint import find_weights, local_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import get_cache_dir, hash_file
from qbheat_det.data import DataError, PretrainingMapper
from qbheat_det.data.images import check_depth
from qbheat_det.inference.predict import encode, open_encoder
from qbheat_det.probing import find_feature

Vector = npt.NDArray[np.float16]
_BATCH = 16
_ROWS = 500  # rows per database query


class Embeddings(NamedTuple):
    """Feature vectors (N, D) of the readable files, and the reasons why the rest is unreadable."""

    files: list[str]
    vectors: Tensor
    unreadable: dict[str, str]


def embed_images(
    files: Sequence[str], encoder: str = "distill/285M", *, device: str | None = None
) -> Embeddings:
    """Returns a feature vector per image, which is the mean of the encoder's coarsest feature map.

    The encoder's input is the central square, resized as in its pre-training. Vectors are cached by
    the path, size and modification time of the file. If a call is interrupted, at most one batch is
    lost.

    Raises:
        UserError: the weights are not of an encoder, or no image can be read.
    """
    name = find_weights(encoder)
    model, cfg = open_encoder(name, device)
    feature, size = find_feature(model), cfg.INPUT.PRETRAIN.SIZE
    mapper = PretrainingMapper(size=size, is_train=False)
    unreadable: dict[str, str] = {}

    def compute(paths: Sequence[str]) -> dict[str, Vector]:
        images = {}
        for path in paths:
            entry = mapper({"file_name": path, "label": 0})
            if isinstance(entry, DataError):
                unreadable[path] = entry.reason
                continue
            try:
                check_depth(path)  # the mapper scales pixels to 8 bits, but detectors do not
                images[path] = entry["image"].permute(1, 2, 0).numpy()
            except ValueError as error:
                unreadable[path] = str(error)
        if not images:
            return {}
        vectors = encode(model, cfg, [*images.values()])[feature].mean(dim=(2, 3)).half().cpu()
        return dict(zip(images, vectors.numpy(), strict=True))

    file = local_weights(name)
    identity = hash_file(file)[:16] if Path(file).is_file() else name.replace("/", "_")
    cache = get_cache_dir() / "embeddings" / f"{identity}_{feature}_{size}.sqlite"
    try:
        found = _compute_missing(cache, files, compute)
    except (OSError, sqlite3.Error) as error:
        raise UserError(
            f"the cache '{cache}' cannot be used ({error}): remove it, or set $QBHEAT_CACHE"
        ) from error
    kept = [path for path in files if path in found]
    if not kept:
        path, reason = next(iter(unreadable.items()))
        raise UserError(f"none of the {len(files):,} images can be read ('{path}': {reason})")
    vectors = torch.from_numpy(np.stack([found[path] for path in kept]))
    return Embeddings(kept, vectors.float(), unreadable)


def _compute_missing(
    cache: Path, files: Sequence[str], compute: Callable[[Sequence[str]], dict[str, Vector]]
) -> dict[str, Vector]:
    """Returns the vectors of files by path. Missing vectors are computed and added to the cache."""
    keys = {path: _make_key(path) for path in files}
    known: dict[str, Vector] = {}
    cache.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(cache, timeout=60)) as database:  # several processes may use it
        database.execute("CREATE TABLE IF NOT EXISTS vectors (key TEXT PRIMARY KEY, value)")
        for part in _cut(keys.values(), _ROWS):
            marks = ",".join("?" * len(part))
            query = f"SELECT key, value FROM vectors WHERE key IN ({marks})"
            for key, value in database.execute(query, part):
                known[key] = np.frombuffer(value, dtype=np.float16)
        found = {path: known[key] for path, key in keys.items() if key in known}
        missing = [path for path in keys if path not in found]
        with tqdm(total=len(missing), unit="image", desc="embedding", disable=None) as bar:
            for part in _cut(missing, _BATCH):
                computed = compute(part)
                rows = [(keys[path], vector.tobytes()) for path, vector in computed.items()]
                with database:  # one transaction
                    database.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)
                found.update(computed)
                bar.update(len(part))
    return found


def _make_key(path: str) -> str:
    try:
        state = os.stat(path)
        suffix = f"{state.st_size}|{state.st_mtime_ns}"
    except OSError:  # the mapper will report it
        suffix = "missing"
    # A file name may have bytes that are not valid UTF-8.
    return os.fsencode(f"{os.path.abspath(path)}|{suffix}").decode(errors="backslashreplace")


def _cut(items: Iterable[str], size: int) -> list[list[str]]:
    listed = list(items)
    return [listed[start : start + size] for start in range(0, len(listed), size)]

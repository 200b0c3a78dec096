# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Computes the feature vectors of images with an encoder, and caches them on disk."""

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from detectron2.utils import comm
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.checkpoint import find_weights, local_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import get_cache_dir, hash_file
from qbheat_det.core.sharing import collect, share
from qbheat_det.data import DataError, PretrainingMapper
from qbheat_det.data.images import check_depth
from qbheat_det.probing import find_feature

from .predict import encode, open_encoder

Vector = npt.NDArray[np.float16]
_BATCH_SIZE = 16
_KEYS_PER_QUERY = 500


class Embeddings(NamedTuple):
    """Feature vectors of images.

    Attributes:
        files: paths of the N readable images.
        vectors: feature vectors (N, D) of ``files``.
        unreadable: maps the path of each unreadable file to the reason.
    """

    files: list[str]
    vectors: Tensor
    unreadable: dict[str, str]


class Embedder:
    """Computes a feature vector per image, which is the mean of the encoder's coarsest feature map.

    The encoder's input is the central square, resized as in its pre-training.

    Attributes:
        key: name of the weights and settings that determine a vector.
    """

    def __init__(self, encoder: str, device: str | None = None) -> None:
        """``encoder`` names the weights of an encoder. Raises a ``UserError`` for other weights."""
        weights = find_weights(encoder)
        self._model, self._cfg = open_encoder(weights, device)
        self._feature = find_feature(self._model)
        size = self._cfg.INPUT.PRETRAIN.SIZE
        self._mapper = PretrainingMapper(size=size, is_train=False)
        file = Path(local_weights(weights))
        if file.is_file():
            weights_key = hash_file(file)[:16]
        else:
            weights_key = weights.replace("/", "_")
        self.key = f"{weights_key}_{self._feature}_{size}"

    def embed(self, paths: Sequence[str]) -> dict[str, Vector | str]:
        """Returns the vector (D,) of each image by path, or the reason why it cannot be read."""
        outcomes: dict[str, Vector | str] = {}
        images = {}  # RGB (S, S, 3), by path
        for path in paths:
            entry = self._mapper({"file_name": path, "label": 0})
            if isinstance(entry, DataError):
                outcomes[path] = entry.reason
                continue
            try:
                # The mapper scales 16-bit pixels to 8 bits, but detectors clip them.
                check_depth(path)
                images[path] = entry["image"].permute(1, 2, 0).numpy()
            except ValueError as error:
                outcomes[path] = str(error)
        if images:
            outputs = encode(self._model, self._cfg, list(images.values()))
            vectors = outputs[self._feature].mean(dim=(2, 3)).half().cpu()  # (N, D)
            outcomes.update(zip(images, vectors.numpy(), strict=True))
        return outcomes


def embed_images(
    files: Sequence[str], encoder: str = "distill/285M", *, device: str | None = None
) -> Embeddings:
    """Returns a feature vector per image (``Embedder``).

    Vectors are cached on disk by the path, size and modification time of the file, so a call that
    was interrupted continues with the next batch. In a process group, each process embeds its share
    of the files. The first one returns all vectors, and the others none.

    Args:
        files: paths of the images.
        encoder: weights of the encoder.
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.

    Raises:
        UserError: the weights are not of an encoder, or no image can be read.
    """
    embedder = Embedder(encoder, device)
    unreadable: dict[str, str] = {}

    def compute(paths: Sequence[str]) -> dict[str, Vector]:
        """Returns the vectors of the readable images by path, and records the others."""
        vectors: dict[str, Vector] = {}
        for path, outcome in embedder.embed(paths).items():
            if isinstance(outcome, str):
                unreadable[path] = outcome
            else:
                vectors[path] = outcome
        return vectors

    cache = get_cache_dir() / "embeddings" / f"{embedder.key}.sqlite"
    shared = share(files)
    try:
        vectors = compute_missing(cache, shared, compute)
    except (OSError, sqlite3.Error) as error:
        raise UserError(
            f"the cache '{cache}' cannot be used ({error}): remove it, or set $QBHEAT_CACHE"
        ) from error
    # The vector of each readable file, and the reason for each unreadable one.
    outcomes: list[Vector | str] = []
    for path in shared:
        outcomes.append(vectors[path] if path in vectors else unreadable[path])
    outcomes = collect(outcomes)
    if not comm.is_main_process():
        return Embeddings([], torch.empty(0, 0), {})
    readable = []
    stacked = []
    for path, outcome in zip(files, outcomes, strict=True):
        if isinstance(outcome, str):
            unreadable[path] = outcome
        else:
            readable.append(path)
            stacked.append(outcome)
    if not readable:
        path, reason = next(iter(unreadable.items()))
        raise UserError(f"none of the {len(files):,} images can be read ('{path}': {reason})")
    return Embeddings(readable, torch.from_numpy(np.stack(stacked)).float(), unreadable)


def compute_missing(
    cache: Path, files: Sequence[str], compute: Callable[[Sequence[str]], dict[str, Vector]]
) -> dict[str, Vector]:
    """Returns the vectors (D,) of files by path. Adds missing vectors to the cache.

    ``compute`` returns the vectors of a batch of files by path, without unreadable files. ``cache``
    is an SQLite file.
    """
    keys = {path: make_key(path) for path in files}
    cached: dict[str, Vector] = {}  # by cache key
    cache.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(cache, timeout=60)) as database:  # several processes may use it
        database.execute("CREATE TABLE IF NOT EXISTS vectors (key TEXT PRIMARY KEY, value)")
        for part in split_list(list(keys.values()), _KEYS_PER_QUERY):
            marks = ",".join("?" * len(part))
            query = f"SELECT key, value FROM vectors WHERE key IN ({marks})"
            for key, value in database.execute(query, part):
                cached[key] = np.frombuffer(value, dtype=np.float16)
        vectors = {path: cached[key] for path, key in keys.items() if key in cached}
        missing = [path for path in keys if path not in vectors]
        with tqdm(total=len(missing), unit="image", desc="embedding", disable=None) as bar:
            for part in split_list(missing, _BATCH_SIZE):
                computed = compute(part)
                rows = [(keys[path], vector.tobytes()) for path, vector in computed.items()]
                with database:  # one transaction
                    database.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)
                vectors.update(computed)
                bar.update(len(part))
    return vectors


def make_key(path: str) -> str:
    """Returns the cache key of a file, which changes with its size and modification time."""
    try:
        state = os.stat(path)
        suffix = f"{state.st_size}|{state.st_mtime_ns}"
    except OSError:  # the mapper will report it
        suffix = "missing"
    # A file name may have bytes that are not valid UTF-8.
    return os.fsencode(f"{os.path.abspath(path)}|{suffix}").decode(errors="backslashreplace")


def split_list(items: list[str], size: int) -> list[list[str]]:
    """Splits a list into parts of ``size`` items; the last part may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]

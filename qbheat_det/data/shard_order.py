# Copyright (c) qbheat_det contributors. Apache-2.0.
"""In which order the images of shards are drawn, so that few shards are in use at once."""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_bytes

from .shard_cache import cache_limit, fetch, is_address
from .shards import is_in_shard, parse_name

AHEAD = 2  # shards' worth of images between their download and their use


class ShardSampler:
    """Endless epochs in which shards come one by one and the images of some mix.

    An image is drawn within ``window`` shards after its shard was begun: shards lie in an order of
    the epoch, and each image goes back from the place of its own by a uniform share of the window.
    All is a function of the seed and of the position.
    """

    def __init__(self, shards: Sequence[int], *, window: int, seed: int) -> None:
        """
        Args:
            shards: (N,), number of the shard of each image.
            window: shards whose images mix.
            seed: of all epochs.
        """
        self._shards = np.asarray(shards)
        self._window = window
        self._seed = seed

    def _infinite_indices(self) -> Iterator[int]:  # as Detectron2's samplers call it
        epoch, count = 0, int(self._shards.max()) + 1
        while True:
            generator = np.random.default_rng((self._seed, epoch))
            place = generator.permutation(count)[self._shards]
            delay = self._window * generator.random(len(self._shards))
            yield from np.argsort(place + delay, kind="stable").tolist()
            epoch += 1


def number_shards(file_names: Iterable[str]) -> list[int] | None:
    """Returns the number of each image's shard; None if an image lies in none."""
    numbers: dict[str, int] = {}
    found = []
    for name in file_names:
        if not is_in_shard(name):
            return None
        found.append(numbers.setdefault(parse_name(name)[0], len(numbers)))
    return found


def check_window(file_names: Iterable[str], window: int) -> None:
    """Checks that the remote shards that are in use at once fit into the cache.

    Args:
        file_names: of all images.
        window: shards whose images mix; 0 for all.

    Raises:
        UserError: they do not fit, so that they would be downloaded again and again.
    """
    places = (parse_name(name)[:2] for name in file_names if is_in_shard(name))
    sizes = sorted({shard: size for shard, size in places if is_address(shard)}.values())
    needed = sum(sizes[-(window + AHEAD) :] if window else sizes)
    if needed > cache_limit():
        raise UserError(
            f"the shards in use at once take {format_bytes(needed)}, but DATALOADER.CACHE_GB "
            f"allows {format_bytes(cache_limit())}: raise it, or lower DATALOADER.SHUFFLE_SHARDS "
            f"({window or 'all'})"
        )


def count_images_ahead(file_names: Sequence[str]) -> int:
    """Returns ``images_ahead`` of ``fetch_ahead``; 0 where an image lies in no remote shard."""
    if not all(is_in_shard(name) and is_address(parse_name(name)[0]) for name in file_names):
        return 0
    return AHEAD * len(file_names) // len({parse_name(name)[0] for name in file_names})


def fetch_ahead(
    shares: Iterable[list[tuple[int, int]]],
    records: Sequence[dict[str, Any]],
    *,
    images_ahead: int,
) -> Iterator[list[tuple[int, int]]]:
    """Yields batches of (position, index), and downloads the shards of later ones meanwhile.

    Args:
        shares: batches.
        records: by index; all lie in remote shards.
        images_ahead: images between the download of their shard and their use.
    """
    wanted: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
    threading.Thread(target=_fetch_all, args=(wanted,), daemon=True).start()
    waiting: list[list[tuple[int, int]]] = []
    try:
        for share in shares:
            for _, index in share:
                wanted.put(parse_name(records[index]["file_name"])[:2])
            waiting.append(share)
            while sum(map(len, waiting)) > images_ahead:
                yield waiting.pop(0)
    finally:
        wanted.put(None)


def _fetch_all(wanted: "queue.SimpleQueue[tuple[str, int] | None]") -> None:
    while (one := wanted.get()) is not None:
        try:
            fetch(*one)
        except UserError:  # is raised where the image is read
            return

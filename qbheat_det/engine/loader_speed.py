# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How fast a training stream gives images when nothing else wants them."""

import time
from dataclasses import dataclass

from qbheat_det.data import TrainStream

_LEAST_BATCHES = 3


@dataclass(frozen=True)
class LoaderSpeed:
    """What a loader reached alone.

    Attributes:
        images_per_second: of this process.
        batch_seconds: a batch took.
        num_workers: processes that load; 0 where the training process itself does.
    """

    images_per_second: float
    batch_seconds: float
    num_workers: int

    def share_waited(self, compute_seconds: float) -> float:
        """Returns the share of a step's time that it will wait for images, in [0, 1].

        Args:
            compute_seconds: of a step, without waiting.
        """
        if self.num_workers == 0:  # one after the other
            return self.batch_seconds / (self.batch_seconds + compute_seconds)
        return max(0.0, 1 - compute_seconds / self.batch_seconds)


def measure_loader(stream: TrainStream, *, seconds: float = 3.0) -> LoaderSpeed:
    """Takes batches of a stream as fast as they come.

    What workers have ready when the first batch arrives is not counted.

    Args:
        stream: from which an iterator of its own is taken.
        seconds: to measure for; the batch that is under way then is counted.
    """
    batches = iter(stream)
    ready = 1 + 2 * stream.num_workers  # PyTorch's loaders work two batches ahead
    try:
        for _ in range(ready):
            next(batches)
        images, count, start = 0, 0, time.perf_counter()
        while count < max(_LEAST_BATCHES, stream.num_workers) or (
            time.perf_counter() - start < seconds
        ):
            images += len(next(batches))
            count += 1
        elapsed = time.perf_counter() - start
    finally:
        end = getattr(batches, "close", None)
        if end:
            end()  # else workers wait for the garbage collector
    return LoaderSpeed(images / elapsed, elapsed / count, stream.num_workers)

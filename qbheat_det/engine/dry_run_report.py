# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The forecast of a dry run as a table, and the speed of a data loader alone."""

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from qbheat_det.core.text import format_bytes, format_duration
from qbheat_det.data import TrainStream

_MIN_BATCHES = 3


@dataclass(frozen=True)
class Cost:
    """Work of one kind in a whole run: seconds each time, and the number of times."""

    name: str
    seconds: float
    times: int

    @property
    def total(self) -> float:
        return self.seconds * self.times


@dataclass(frozen=True)
class DryRunReport:
    """Measured on a few steps and images; ``str`` gives the table.

    Memory is the peak of this process and its workers, GPU memory that of tensors (0 without a
    GPU), loaders those of all processes together.
    """

    costs: tuple[Cost, ...]
    num_parameters: int
    num_trainable: int
    num_tensors_compared: int  # read back from the checkpoint, and equal bit for bit
    num_checkpoints_kept: int  # most that lie on the disk at a time
    checkpoint_bytes: int  # of one
    weights_bytes: int  # of the best and the final weights together
    free_bytes: int  # on the disk of OUTPUT_DIR
    memory_bytes: int
    memory_total_bytes: int
    loader_images_per_second: float
    wanted_images_per_second: float  # by steps that never wait
    waiting: str = ""  # advice where steps will wait for data
    gpu_bytes: int = 0
    gpu_total_bytes: int = 0

    @property
    def total_seconds(self) -> float:
        """Of the whole run."""
        return sum(cost.total for cost in self.costs)

    @property
    def disk_bytes(self) -> int:
        """Of all files of weights that lie on the disk at a time."""
        return self.num_checkpoints_kept * self.checkpoint_bytes + self.weights_bytes

    def __str__(self) -> str:
        rows = [
            f"{cost.name:<32}{format_duration(cost.seconds):>18}{cost.times:>10,}"
            f"{format_duration(cost.total):>16}"
            for cost in self.costs
        ]
        return "\n".join(
            [
                f"{self.num_tensors_compared} tensors of a checkpoint read back bit for bit.",
                f"{self.num_parameters:,} parameters, {self.num_trainable:,} of them trained.",
                "",
                f"{'Forecast':<32}{'each':>18}{'times':>10}{'together':>16}",
                *rows,
                f"{'Whole run':<60}{format_duration(self.total_seconds):>16}",
                "",
                *self._resources(),
            ]
        )

    def _resources(self) -> Iterator[str]:
        def compare(name: str, needed: int, available: int, of: str = " per process") -> str:
            return (
                f"{name + ':':<12}{format_bytes(needed)}{of}, {format_bytes(available)} available"
            )

        if self.gpu_total_bytes:
            yield compare("GPU memory", self.gpu_bytes, self.gpu_total_bytes)
        yield compare("Memory", self.memory_bytes, self.memory_total_bytes)
        yield (
            f"{compare('Disk', self.disk_bytes, self.free_bytes, '')} "
            f"({self.num_checkpoints_kept} checkpoints of {format_bytes(self.checkpoint_bytes)}, "
            f"weights of {format_bytes(self.weights_bytes)})"
        )
        yield (
            f"{'Images:':<12}{self.loader_images_per_second:.3g} per second from the loader alone; "
            f"steps would take {self.wanted_images_per_second:.3g}"
        )
        if self.waiting:
            yield f"{self.waiting}."
        if self.disk_bytes >= self.free_bytes:
            yield "The disk is too small: lower SOLVER.CHECKPOINTS_KEPT or free some space."
        yield "Larger images take more memory and time."


def measure_loader(stream: TrainStream, *, seconds: float = 3.0) -> tuple[float, float]:
    """Returns images per second and seconds per batch of a data loader alone.

    Batches prefetched before the first are not counted.
    """
    batches = iter(stream)
    prefetched = 1 + 2 * stream.num_workers  # PyTorch's loaders work two batches ahead
    try:
        for _ in range(prefetched):
            next(batches)
        images, count, start = 0, 0, time.perf_counter()
        while count < max(_MIN_BATCHES, stream.num_workers) or (
            time.perf_counter() - start < seconds
        ):
            images += len(next(batches))
            count += 1
        elapsed = time.perf_counter() - start
    finally:
        if isinstance(batches, Generator):
            batches.close()  # otherwise workers wait for the garbage collector
    return images / elapsed, elapsed / count


def share_waited(compute_seconds: float, batch_seconds: float, num_workers: int) -> float:
    """Returns the share of a step's time that it waits for data, in [0, 1]."""
    if num_workers == 0:  # one after the other
        return batch_seconds / (batch_seconds + compute_seconds)
    return max(0.0, 1 - compute_seconds / batch_seconds)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Batches on their way to the device and losses on their way back, without waiting on a GPU.

There, the next batch is loaded and copied while the step computes, and losses are read while the
backward pass runs.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from detectron2.structures import Instances
from detectron2.utils import comm
from torch import Tensor

BatchedInputs = list[dict[str, Any]]


class BatchSource:
    """Takes batches from an iterator, on a GPU one ahead.

    Copies are asynchronous if the loader gives pinned memory. A batch stays in memory until the
    next is taken: by then the losses of its step have been read back, so no GPU needs it.
    """

    def __init__(self, next_batch: Callable[[], BatchedInputs], device: torch.device) -> None:
        """``next_batch`` loads a batch; raises StopIteration after the last."""
        self._next_batch = next_batch
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device
        self._ahead: BatchedInputs | None = None
        self._in_use: BatchedInputs | None = None
        self._waited = 0.0

    def take(self) -> tuple[BatchedInputs, float]:
        """Returns a batch, and the seconds that the step waited for it to be loaded.

        On a GPU they count only if it had nothing left to compute.

        Raises:
            StopIteration: there is none left.
        """
        if self._stream is None:
            start = time.perf_counter()
            return self._next_batch(), time.perf_counter() - start
        if self._ahead is None:
            self.load_ahead()
        if self._ahead is None:
            raise StopIteration
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._in_use, self._ahead = self._ahead, None
        return self._in_use, self._waited

    def load_ahead(self) -> None:
        """Loads the next batch and copies it to the GPU while it computes; nothing on the CPU."""
        if self._stream is None or self._ahead is not None:
            return
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        start = time.perf_counter()
        try:
            batch = self._next_batch()
        except StopIteration:  # is raised by ``take``
            return
        self._waited = time.perf_counter() - start if computed.query() else 0.0
        with torch.cuda.stream(self._stream):
            self._ahead = [_move(entry, self._device) for entry in batch]


class LossReading:
    """Losses of a micro-batch on their way to the CPU: one transfer, awaited when they are read."""

    def __init__(self, losses: Mapping[str, Tensor]) -> None:
        """Starts the exchange of 0-d tensors between processes, and the transfer."""
        own = torch.stack([loss.detach().float() for loss in losses.values()])
        mean = own.clone()
        if comm.get_world_size() > 1:
            torch.distributed.all_reduce(mean)
        both = torch.stack([own, mean / comm.get_world_size()])
        self.is_late = both.device.type == "cuda"
        """Whether the GPU should have further work before ``values`` waits."""
        self._names = list(losses)
        self._values = both
        if self.is_late:
            self._values = torch.empty(both.shape, pin_memory=True).copy_(both, non_blocking=True)
            self._arrived = torch.cuda.Event()
            # By default it is the current device's, which need not be that of the losses.
            self._arrived.record(torch.cuda.current_stream(both.device))

    def values(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns losses of this process, and their means over all."""
        if self.is_late:
            self._arrived.synchronize()
        here, everywhere = (dict(zip(self._names, row)) for row in self._values.tolist())  # noqa: B905
        return here, everywhere


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Instances):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _move(part, device) for name, part in value.items()}
    return value

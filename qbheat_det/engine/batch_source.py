# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Moves batches from the loader to the device."""

import time
from collections.abc import Callable
from typing import Any

import torch
from detectron2.structures import Instances
from torch import Tensor

from qbheat_det.core.errors import UserError

BatchedInputs = list[dict[str, Any]]


class BatchSource:
    """Takes batches from an iterator and, on a GPU, loads one batch ahead.

    Copies are asynchronous if the loader pins memory. A batch stays in memory until the next one is
    taken: by then the losses of its step have been read, so the GPU no longer needs it.
    """

    def __init__(self, next_batch: Callable[[], BatchedInputs], device: torch.device) -> None:
        """``next_batch`` loads a batch, and raises ``StopIteration`` after the last one."""
        self._next_batch = next_batch
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device
        self._ahead: BatchedInputs | None = None
        self._in_use: BatchedInputs | None = None
        self._end: Exception | None = None
        self._waited = 0.0

    def take(self) -> tuple[BatchedInputs, float]:
        """Returns a batch, and the seconds that the step waited for it.

        On a GPU, waiting counts only while the GPU is idle.

        Raises:
            StopIteration: there are no more batches.
        """
        start = time.perf_counter()
        if self._stream is None:
            return self._next_batch(), time.perf_counter() - start
        if self._ahead is None:
            self.load_ahead()
        if self._ahead is None:
            raise self._end or StopIteration
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._in_use, self._ahead = self._ahead, None
        return self._in_use, self._waited

    def load_ahead(self) -> None:
        """Loads the next batch and copies it to the GPU; does nothing on the CPU."""
        if self._stream is None or self._ahead is not None:
            return
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        start = time.perf_counter()
        try:
            batch = self._next_batch()
        except (StopIteration, UserError) as error:  # ``take`` raises it
            self._end = self._end or error
            return
        self._waited = time.perf_counter() - start if computed.query() else 0.0
        with torch.cuda.stream(self._stream):
            self._ahead = [_move(entry, self._device) for entry in batch]


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Instances):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _move(part, device) for name, part in value.items()}
    if isinstance(value, list):
        return [_move(part, device) for part in value]
    return value

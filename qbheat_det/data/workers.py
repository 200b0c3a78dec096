# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Batches of worker processes: without enough shared memory, and from workers that stop working.

PyTorch's workers pass tensors through files in /dev/shm. If it is full, PyTorch loses the batch
without an error, and the training waits without end. Containers often have only 64 MB.
"""

import errno
import io
import logging
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import get_worker_info

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line

logger = logging.getLogger(__name__)

WORKER_SECONDS = 600.0
"""Longest time without a batch of the workers."""
_HINT = "the computer may be out of memory, or its disk hangs; DATALOADER.NUM_WORKERS 0 needs less"


@dataclass(frozen=True)
class _PackedBatch:
    """A batch that passes through a pipe, because there is no shared memory for its tensors."""

    content: bytes
    reason: str


class _Sharer(pickle.Pickler):
    """Moves all tensors in an object to shared memory. What it writes is not used."""

    def persistent_id(self, value: Any) -> str | None:
        if not isinstance(value, Tensor):
            return None
        value.share_memory_()
        return "tensor"


def share_batch(batch: Any) -> Any:
    """Moves the tensors of a worker's batch to shared memory; a loader's ``collate_fn``.

    If the shared memory is full, the batch is packed. ``receive_batches`` unpacks it.
    """
    if get_worker_info() is None:
        return batch
    try:
        _Sharer(io.BytesIO()).dump(batch)
    except RuntimeError as error:  # PyTorch's error of a full /dev/shm
        return _PackedBatch(pickle.dumps(batch), one_line(error))
    return batch


def find_timeout(num_workers: int) -> float:
    """Returns the ``timeout`` of a loader. PyTorch allows none without workers."""
    return WORKER_SECONDS if num_workers else 0.0


def start_workers(loader: Iterable[Any]) -> Iterator[Any]:
    """Returns the iterator of a loader, whose creation starts the workers.

    Raises a ``UserError`` if there is not even memory for the locks that workers share.
    """
    try:
        return iter(loader)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(
            "the shared memory /dev/shm is full, so no worker can start: enlarge it (docker run "
            "--shm-size 2g), or set DATALOADER.NUM_WORKERS 0"
        ) from error


def receive_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Yields the batches of a loader whose ``collate_fn`` is ``share_batch``.

    The log has a warning at the first batch that did not fit into the shared memory. Raises a
    ``UserError`` if a worker ended, or if the workers yield nothing for a long time.
    """
    has_warned = False
    iterator = start_workers(batches)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except RuntimeError as error:
            if str(error).startswith("DataLoader timed out"):
                minutes = f"{WORKER_SECONDS / 60:g} minutes"
                raise UserError(f"the workers gave no batch for {minutes}: {_HINT}") from error
            if str(error).startswith("DataLoader worker (pid"):
                raise UserError(f"a worker ended ({one_line(error)}): {_HINT}") from error
            raise
        if isinstance(batch, _PackedBatch):
            if not has_warned:
                logger.warning(
                    "The shared memory /dev/shm is full, so batches pass through pipes, which is "
                    f"slower: enlarge it (docker run --shm-size 2g). {batch.reason}"
                )
                has_warned = True
            batch = pickle.loads(batch.content)  # of this program's own worker
        yield batch

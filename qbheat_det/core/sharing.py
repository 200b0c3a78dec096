# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Shares files among the processes of a group. A single process does not import PyTorch for it."""

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

R = TypeVar("R")
T = TypeVar("T")

# Environment variables that torchrun sets in each process.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SHARING_TIMEOUT = timedelta(days=7)  # processes with little work wait for the others


def is_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return all(name in os.environ for name in _RANK_VARIABLES)


def run_sharing_files(main: Callable[[], R]) -> R:
    """Calls ``main()`` in each process of torchrun, or once without torchrun.

    In ``main``, each process takes its ``share`` of a list and ``collect``s all results. Processes
    exchange nothing else, so GPUs need no NCCL. If there are GPUs, each process has one.
    """
    if not is_torchrun():
        return main()
    import torch  # a single process may run an exported file without PyTorch

    from .torchrun import run_as_rank

    def choose_backend() -> str:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        return "gloo"

    return run_as_rank(main, choose_backend, timeout=_SHARING_TIMEOUT)


def is_main_process() -> bool:
    """Returns whether this is the first process of its group, or the only one."""
    if not _is_in_group():
        return True
    from detectron2.utils import comm

    return comm.is_main_process()


def get_world_size() -> int:
    """Returns the number of processes in the group; 1 for a single process."""
    if not _is_in_group():
        return 1
    from detectron2.utils import comm

    return comm.get_world_size()


def _is_in_group() -> bool:
    """Returns whether there is a process group, which there is not before PyTorch is imported."""
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def share(items: Sequence[T]) -> list[T]:
    """Returns the items of this process: every P-th one of P processes.

    The items are those of the first process, because a folder may change while it is listed.
    """
    if not _is_in_group():
        return list(items)
    from detectron2.utils import comm

    items = comm.all_gather(items)[0]
    return list(items[comm.get_rank() :: comm.get_world_size()])


def collect(results: Sequence[R]) -> list[R]:
    """Returns the results of all processes in the first process, and an empty list in the others.

    ``results`` has one result for each item of ``share``. The returned list has the order of the
    items before they were shared.
    """
    if not _is_in_group():
        return list(results)
    from detectron2.utils import comm

    shares = comm.gather(results)
    total = sum(len(one) for one in shares)
    return [shares[index % len(shares)][index // len(shares)] for index in range(total)]

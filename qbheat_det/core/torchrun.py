# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Joins the processes that torchrun has started."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from detectron2.engine.launch import DEFAULT_TIMEOUT
from detectron2.utils import comm
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from .errors import UserError, is_lost_peer
from .termination import Interrupted

R = TypeVar("R")

_ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_SHARES_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True" if processes use torchrun's own store
_JOIN_TIMEOUT = timedelta(minutes=5)  # until all processes have joined


def run_as_rank(
    main: Callable[[], R],
    choose_backend: Callable[[], str],
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> R:
    """Joins the process group of torchrun, and calls ``main()`` in this process.

    Args:
        main: the job of each process.
        choose_backend: returns "nccl" or "gloo". It may raise a ``UserError``.
        timeout: longest time that a process waits for the others.

    Raises:
        UserError: the processes cannot join, or ``main`` or ``choose_backend`` raised a
            ``UserError``. One process raises it, and the others exit with code 2.
    """
    missing = [name for name in _ADDRESS_VARIABLES if name not in os.environ]
    if missing:
        raise UserError(
            f"RANK is set, but not {' and '.join(missing)}: start with torchrun "
            "(docs/distributed.md)"
        )
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    is_one_machine = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    if may_restart and not is_one_machine and os.environ.get(_SHARES_STORE) == "True":
        raise UserError(
            "torchrun --max-restarts on several machines needs the environment variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, else processes look for those that have ended"
        )
    store, rank, world_size = next(rendezvous("env://", timeout=_JOIN_TIMEOUT))
    if is_one_machine:
        # torchrun's store survives a restart, and new processes would wait for the ended ones that
        # it lists. The prefix prevents this on one machine. With several machines, the number of
        # restarts is not shared, and the variable above gives them a new store for each start.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"attempt_{attempt}", store)
    try:
        backend = choose_backend()
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        # Detectron2's ``launch`` would create this group of the processes on this machine.
        comm._LOCAL_PROCESS_GROUP, _ = dist.new_subgroups(int(os.environ["LOCAL_WORLD_SIZE"]))
        comm.synchronize()
        result = main()
        comm.synchronize()
    except Interrupted as stop:
        if rank > 0:  # only the first process reports it
            raise SystemExit(stop.code) from None
        raise
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise UserError(
            f"process {rank} lost the connection to another process: start the command again, "
            "or let torchrun --max-restarts do so (docs/distributed.md)"
        ) from error
    except UserError:
        # Usually every process raises this error. Only the first one to get here reports it.
        num_errors = store.add("qbheat_det/user_error", 1)
        if num_errors == 1:
            raise
        time.sleep(1)  # torchrun ends all processes after the first exit, so let that one report
        raise SystemExit(2) from None
    dist.destroy_process_group()
    return result

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs a function in one or more processes, with torchrun or Detectron2's ``launch``."""

import argparse
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from detectron2.engine.defaults import create_ddp_model
from detectron2.engine.launch import DEFAULT_TIMEOUT, launch
from detectron2.utils import comm
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.spawn import ProcessRaisedException

from qbheat_det.checkpoint import load_run_config
from qbheat_det.config import load_config
from qbheat_det.core.errors import Interrupted, UserError, find_user_message, is_lost_peer
from qbheat_det.modeling.contracts import get_backbone, get_in_features

from .run_config import as_opts
from .run_flags import RunFlags

R = TypeVar("R")

# Environment variables that torchrun sets in each process.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_SHARES_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True" if processes use torchrun's own store
_JOIN_TIMEOUT = timedelta(minutes=5)  # until all processes have joined
_TORCHRUN = "torchrun --nproc-per-node N tools/train_net.py … (docs/distributed.md)"


def run_distributed(main: Callable[[argparse.Namespace], R], args: argparse.Namespace) -> R | None:
    """Calls ``main(args)`` in every process of the run.

    Under torchrun, this process joins the process group: NCCL if the config uses GPUs, else gloo.
    Without torchrun, Detectron2 starts ``args.num_gpus`` processes on this machine.

    Returns:
        The result of ``main`` in this process; None if other processes ran it.

    Raises:
        UserError: the processes cannot be started, or ``main`` raised a ``UserError`` in one of
            them. Under torchrun, one process raises it and the others exit with code 2.
    """
    if all(name in os.environ for name in _RANK_VARIABLES):
        return _run_as_rank(main, args)
    if min(args.num_gpus, args.num_machines) < 1:
        raise UserError("--num-gpus and --num-machines must be at least 1")
    if args.num_gpus * args.num_machines == 1:
        return main(args)
    if not _uses_gpus(args, args.num_gpus):
        raise UserError(f"--num-gpus needs GPUs and MODEL.DEVICE cuda; on the CPU use {_TORCHRUN}")
    dist_url = args.dist_url
    if args.num_machines == 1 and dist_url.startswith("tcp://127.0.0.1"):
        # Detectron2's default port is the same for all runs of a user. "auto" finds a free port.
        dist_url = "auto"
    try:
        launch(
            main,
            args.num_gpus,
            num_machines=args.num_machines,
            machine_rank=args.machine_rank,
            dist_url=dist_url,
            args=(args,),
        )
    except ProcessRaisedException as error:
        message = find_user_message(str(error))
        if message is None:
            raise
        raise UserError(message) from error
    return None


def _uses_gpus(args: argparse.Namespace, wanted: int) -> bool:
    """Whether the config uses GPUs; raises a ``UserError`` if there are fewer than ``wanted``."""
    device = _read_device(RunFlags.from_args(args))
    if not (device.startswith("cuda") and torch.cuda.is_available()):
        return False
    available = torch.cuda.device_count()
    if wanted > available:
        raise UserError(f"{wanted} processes need as many GPUs, but PyTorch finds {available}")
    return True


def _read_device(flags: RunFlags) -> str:
    """Returns ``MODEL.DEVICE`` of the run's config, without reading the data."""
    overrides = flags.overrides
    opts = as_opts(overrides)
    weights = overrides.get("MODEL.WEIGHTS")
    if weights and not flags.config_file:
        cfg = load_run_config(weights, opts=opts)
    else:
        cfg = load_config(flags.config_file or None, opts)
    return str(cfg.MODEL.DEVICE)


def _run_as_rank(main: Callable[[argparse.Namespace], R], args: argparse.Namespace) -> R:
    """Joins the process group of torchrun, and calls ``main(args)`` in this process."""
    missing = [name for name in _ADDRESS_VARIABLES if name not in os.environ]
    if missing:
        raise UserError(f"RANK is set, but not {' and '.join(missing)}: start with {_TORCHRUN}")
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
        backend = _choose_backend(args)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=DEFAULT_TIMEOUT
        )
        # Detectron2's ``launch`` would create this group of the processes on this machine.
        comm._LOCAL_PROCESS_GROUP, _ = dist.new_subgroups(int(os.environ["LOCAL_WORLD_SIZE"]))
        comm.synchronize()
        result = main(args)
        comm.synchronize()
    except Interrupted as stop:
        if rank > 0:  # only the first process reports it
            raise SystemExit(stop.code) from None
        raise
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise UserError(
            f"process {rank} lost the connection to another process: with --max-restarts, "
            "torchrun continues from the last checkpoint (docs/distributed.md)"
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


def _choose_backend(args: argparse.Namespace) -> str:
    """Returns the name of the backend, and sets this process's GPU."""
    if args.num_gpus > 1 or args.num_machines > 1:
        raise UserError("torchrun starts the processes: leave out --num-gpus and --num-machines")
    if not _uses_gpus(args, int(os.environ["LOCAL_WORLD_SIZE"])):
        return "gloo"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return "nccl"


def distribute(model: nn.Module) -> nn.Module:
    """Wraps a model in ``DistributedDataParallel`` if there are several processes."""
    arguments: dict[str, Any] = {
        "broadcast_buffers": False,
        "find_unused_parameters": may_have_unused_parameters(model),
    }
    if next(model.parameters()).device.type == "cpu":
        arguments["device_ids"] = None  # otherwise Detectron2 passes the number of a GPU
    return create_ddp_model(model, **arguments)


def may_have_unused_parameters(model: nn.Module) -> bool:
    """Whether the backbone may have outputs, with their own parameters, that no head reads.

    Only then must DDP search the graph for unused parameters in every step.
    """
    backbone = get_backbone(model)
    if backbone is None:
        return True
    used_outputs = get_in_features(model)
    if used_outputs is None:  # unknown
        return True
    return set(backbone.output_shape()) != set(used_outputs)

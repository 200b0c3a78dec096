# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs a function in one or more processes, with torchrun or Detectron2's ``launch``."""

import argparse
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from detectron2.engine.defaults import create_ddp_model
from detectron2.engine.launch import launch
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException

from qbheat_det.checkpoint import load_run_config
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError, find_user_message
from qbheat_det.core.sharing import is_torchrun
from qbheat_det.core.torchrun import run_as_rank
from qbheat_det.modeling.contracts import get_backbone, get_in_features

from .run_config import as_opts
from .run_flags import RunFlags

R = TypeVar("R")

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
    if is_torchrun():
        return run_as_rank(lambda: main(args), lambda: _choose_backend(args))
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
    if weights and not (flags.config_file or flags.size):
        cfg = load_run_config(weights, opts=opts)
    else:
        cfg = load_config(flags.config_file or None, opts)
    return str(cfg.MODEL.DEVICE)


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

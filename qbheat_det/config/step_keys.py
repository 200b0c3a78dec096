# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Keys of how a training step computes, which change neither the model nor what is learned."""

import torch
from detectron2.config import CfgNode

from qbheat_det.errors import UserError


def add_step_keys(cfg: CfgNode) -> None:
    """Adds the keys to a config, in place."""
    # Compile the blocks of backbone, decoder and head for training. The first steps take minutes.
    cfg.SOLVER.COMPILE = False
    # On the CPU, keep the memory that a step frees for the next one, where else the kernel fills it
    # with zeros page by page. It holds for the whole process. Only with glibc.
    cfg.SOLVER.KEEP_MEMORY = True
    # Keep only what enters each block, and compute its inside again in the backward pass: less
    # memory, a longer step, the same gradients.
    cfg.MODEL.ACTIVATION_CHECKPOINTING = False
    # Keep maps with their channels innermost in training. None: on CPUs, which lose nothing by it.
    cfg.MODEL.CHANNELS_LAST = None


def find_memory_format(cfg: CfgNode) -> torch.memory_format:
    """Returns the layout that ``MODEL.CHANNELS_LAST`` asks for, on ``MODEL.DEVICE`` if it is None.

    Args:
        cfg: with this package's keys.

    Raises:
        UserError: ``MODEL.CHANNELS_LAST`` is something else than True, False and None.
    """
    asked = cfg.MODEL.CHANNELS_LAST
    if asked not in (None, True, False):  # next to None, configs take any type
        raise UserError(
            f"MODEL.CHANNELS_LAST is True, False or None (the device's own), not '{asked}'"
        )
    on_cpu = torch.device(cfg.MODEL.DEVICE).type == "cpu"
    innermost = on_cpu if asked is None else asked
    return torch.channels_last if innermost else torch.contiguous_format

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the keys of a step change in a model: how it computes, and not what."""

import logging

from detectron2.config import CfgNode
from torch import nn

from qbheat_det.core.environment import keep_freed_memory

from .training_blocks import checkpoint_blocks

logger = logging.getLogger(__name__)


def use_step_keys(cfg: CfgNode, model: nn.Module) -> None:
    """Prepares process and model for training as the config asks; says what it did.

    Args:
        cfg: ``SOLVER.KEEP_MEMORY``, ``SOLVER.COMPILE`` and ``MODEL.ACTIVATION_CHECKPOINTING`` are
            read.
        model: on its device, before it is wrapped for several processes.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    if cfg.SOLVER.KEEP_MEMORY and on_cpu and keep_freed_memory():
        logger.info(
            "Memory that a step frees stays with this process, for the next one "
            "(SOLVER.KEEP_MEMORY False gives it back)"
        )
    if cfg.MODEL.ACTIVATION_CHECKPOINTING:
        count = checkpoint_blocks(model)
        logger.info(
            "Activation checkpointing: %d blocks keep their inputs alone, and compute the rest "
            "again in the backward pass", count,
        )  # fmt: skip
    if cfg.SOLVER.COMPILE:
        # Needs seconds, and most runs do without.
        from .compiled_training import compile_blocks

        compile_blocks(model)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the keys of a step change in a model: how it computes, and not what."""

import logging

from detectron2.config import CfgNode
from torch import nn

from .training_blocks import checkpoint_blocks

logger = logging.getLogger(__name__)


def use_step_keys(cfg: CfgNode, model: nn.Module) -> None:
    """Prepares a model's blocks for training as the config asks; says what it did.

    Args:
        cfg: ``MODEL.ACTIVATION_CHECKPOINTING`` and ``SOLVER.COMPILE`` are read.
        model: on its device, before it is wrapped for several processes.
    """
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

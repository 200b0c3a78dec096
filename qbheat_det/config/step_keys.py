# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Keys of how a training step computes, which change neither the model nor what is learned."""

from detectron2.config import CfgNode


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

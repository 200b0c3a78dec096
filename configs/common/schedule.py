# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Learning rates over a run, from numbers of steps as the cards of the YAML configs have them."""

from collections.abc import Sequence

from detectron2.config import LazyCall as L
from detectron2.solver import WarmupParamScheduler
from fvcore.common.param_scheduler import CosineParamScheduler, MultiStepParamScheduler
from omegaconf import DictConfig


def multi_step(
    max_iter: int, steps: Sequence[int], *, warmup: int = 1000, factor: float = 0.001
) -> DictConfig:
    """The rate falls to a tenth after each of ``steps``, and rises over the first ``warmup``."""
    drops = L(MultiStepParamScheduler)(
        values=[0.1**i for i in range(len(steps) + 1)], milestones=list(steps), num_updates=max_iter
    )
    return _warmed_up(drops, warmup / max_iter, factor)


def cosine(max_iter: int, *, warmup: int, factor: float = 0.001) -> DictConfig:
    """The rate falls to zero as half a cosine, and rises over the first ``warmup`` steps."""
    return _warmed_up(
        L(CosineParamScheduler)(start_value=1.0, end_value=0.0), warmup / max_iter, factor
    )


def _warmed_up(scheduler: DictConfig, length: float, factor: float) -> DictConfig:
    return L(WarmupParamScheduler)(
        scheduler=scheduler,
        warmup_factor=factor,
        warmup_length=min(length, 1.0),
        warmup_method="linear",
    )

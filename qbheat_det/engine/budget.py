# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Chooses image size, epochs and frozen stages so that a run ends within a number of minutes.

Steps of the recipe are timed on this machine. Step time is assumed to be proportional to the area
of the images. The chosen settings are timed again to determine the number of epochs.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.utils import comm

from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_duration

from .dry_run import dry_run
from .resume import name_last_checkpoint
from .run_flags import RunFlags, find_job
from .setup import build_config
from .trainer import Trainer

_SIZES = (2 / 3, 7 / 9, 1, 4 / 3, 16 / 9)  # of the recipe's shorter side
_STRIDE = 32
_ENOUGH = 2 / 3  # share of the recipe's epochs that an image size must allow to be chosen
_FEWEST, _MOST = 1 / 3, 3  # times the recipe's epochs; below _FEWEST, the backbone is frozen
_NUM_STEPS = 12  # steps that are timed
_SHARE = 0.95  # planned share of the budget, as the duration of steps varies


@dataclass(frozen=True)
class Pace:
    """Seconds of a run that do not depend on its length, and seconds per epoch."""

    fixed: float
    epoch: float

    def count_epochs(self, seconds: float, area: float = 1.0) -> float:
        """Returns the epochs that fit in ``seconds``, if images have ``area`` times the pixels."""
        return max(0.0, seconds - self.fixed) / (self.epoch * area)


def plan_run(flags: RunFlags, build_trainer: Callable[[CfgNode], Trainer]) -> tuple[RunFlags, str]:
    """Returns flags whose ``epochs``, ``image_size`` and ``freeze`` fit ``minutes``, and a summary.

    Flags given by the user do not change. A resumed run keeps the plan in its ``config.yaml``.

    Raises:
        UserError: the recipe has no ``SOLVER.EPOCHS`` or trains from cached features, the user also
            sets the epochs, or the time is too short for any training.
    """
    start, seconds = time.monotonic(), 60 * (flags.minutes or 0)
    flags = dataclasses.replace(RunFlags.read(flags), minutes=None)
    cfg = build_config(flags)
    if flags.resume and name_last_checkpoint(Path(cfg.OUTPUT_DIR)):
        return _read_plan(flags, Path(cfg.OUTPUT_DIR)), "The run keeps the plan of its start"
    usual = cfg.SOLVER.EPOCHS
    if cfg.MODEL.CACHE_FEATURES.ENABLED or not usual:
        raise UserError(
            "--minutes plans runs by SOLVER.EPOCHS and without MODEL.CACHE_FEATURES: use --epochs"
        )
    if "SOLVER.EPOCHS" in flags.overrides:
        raise UserError("--minutes and --epochs both set the length: leave one out")
    pace = _measure(cfg, build_trainer)
    size, freeze = None, False
    planned = _SHARE * seconds
    if find_job(cfg) == "boxes" and flags.image_size is None:
        size, freeze = _choose(cfg, pace, planned)
        freeze = freeze and "MODEL.BACKBONE.FREEZE_AT" not in flags.overrides
    if size or freeze:
        flags = dataclasses.replace(flags, image_size=size, freeze=flags.freeze or freeze)
        pace = _measure(build_config(flags), build_trainer)
    left = comm.all_gather(planned - (time.monotonic() - start))[0]
    epochs = min(pace.count_epochs(left), _MOST * usual)
    if epochs < 0.01 * usual:
        least = format_duration(pace.fixed + 0.1 * usual * pace.epoch)
        raise UserError(f"--minutes {seconds / 60:g} is too short: this machine needs {least}")
    chosen = dataclasses.replace(flags, epochs=float(f"{epochs:.3g}"))
    return chosen, _explain(cfg, chosen, pace, seconds)


def _measure(cfg: CfgNode, build_trainer: Callable[[CfgNode], Trainer]) -> Pace:
    """Times a few steps and the evaluation of a few images; returns the same on all processes."""
    logging.disable(logging.WARNING)  # hides the results of a model that is hardly trained
    try:
        report = dry_run(cfg, build_trainer, num_steps=_NUM_STEPS)
    finally:
        logging.disable(logging.NOTSET)
    growing = sum(seconds * times for name, (seconds, times) in report.costs.items()
                  if name.startswith(("Step", "Evaluation")))  # fmt: skip
    pace = Pace(report.total_seconds - growing, growing / cfg.SOLVER.EPOCHS)
    return Pace(*comm.all_gather((pace.fixed, pace.epoch))[0])


def _choose(cfg: CfgNode, pace: Pace, seconds: float) -> tuple[int | None, bool]:
    """Returns the image size (None for the recipe's size), and whether to freeze the backbone.

    Chooses the largest size that allows enough epochs. If no size does, chooses the smallest one.
    If that size allows less than ``_FEWEST`` of the recipe's epochs, keeps the recipe's size and
    freezes the backbone.
    """
    usual, epochs = max(cfg.INPUT.MIN_SIZE_TRAIN), cfg.SOLVER.EPOCHS
    sizes = [round(share * usual / _STRIDE) * _STRIDE for share in _SIZES]
    affordable = {size: pace.count_epochs(seconds, (size / usual) ** 2) for size in sizes}
    enough = [size for size in sizes if affordable[size] >= _ENOUGH * epochs]
    if enough:
        return (None if max(enough) == usual else max(enough)), False
    freeze = affordable[sizes[0]] < _FEWEST * epochs
    return (None, True) if freeze else (sizes[0], False)


def _read_plan(flags: RunFlags, folder: Path) -> RunFlags:
    """Returns flags with the plan that the ``config.yaml`` of a run records."""
    cfg = load_config(folder / "config.yaml")
    size = max(cfg.INPUT.MIN_SIZE_TRAIN) if find_job(cfg) == "boxes" else cfg.INPUT.PRETRAIN.SIZE
    freeze = cfg.MODEL.BACKBONE.FREEZE_AT >= 5 and "MODEL.BACKBONE.FREEZE_AT" not in flags.opts
    return dataclasses.replace(flags, epochs=cfg.SOLVER.EPOCHS, image_size=size, freeze=freeze)


def _explain(cfg: CfgNode, chosen: RunFlags, pace: Pace, seconds: float) -> str:
    """Returns a summary of the chosen flags and their speed."""
    words = f"--epochs {chosen.epochs:g}"
    words += f" --image-size {chosen.image_size}" if chosen.image_size else ""
    words += " --freeze, as there is no time to train the backbone" if chosen.freeze else ""
    return (
        f"Plan for {format_duration(seconds)}: {words}; an epoch takes "
        f"{format_duration(pace.epoch)}, and the recipe has {cfg.SOLVER.EPOCHS:g}"
    )

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Chooses image size, epochs and frozen stages so that a run ends within a number of minutes.

Steps of the recipe are timed on this machine. Step time is assumed to be proportional to the area
of the images. The chosen settings are timed again to determine the number of epochs.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.utils import comm

from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_duration
from qbheat_det.solver import count_epochs

from .dry_run import dry_run
from .resume import name_last_checkpoint
from .run_flags import SIZES, WHOLE_BACKBONE, RunFlags, find_job
from .setup import build_config
from .stages import find_first_stage, is_done
from .trainer import Trainer

_SIZES = (2 / 3, 7 / 9, 1, 4 / 3, 16 / 9)  # of the recipe's shorter side
_STRIDE = 32
_ENOUGH = 2 / 3  # share of the recipe's epochs that an image size must allow to be chosen
_FEWEST, _MOST = 1 / 3, 3  # times the recipe's epochs; below _FEWEST, the backbone is frozen
_NUM_STEPS = 12  # steps that are timed
_SHARE = 0.95  # planned share of the budget, as the duration of steps varies


@dataclass(frozen=True)
class Pace:
    """Seconds of a run that do not depend on its length, seconds per epoch, and usual epochs."""

    fixed: float
    epoch: float
    usual: float

    def count_epochs(self, seconds: float, area: float = 1.0) -> float:
        """Returns the epochs that fit in ``seconds``, if images have ``area`` times the pixels."""
        return max(0.0, seconds - self.fixed) / (self.epoch * area)


def plan_run(flags: RunFlags, build_trainer: Callable[[CfgNode], Trainer]) -> tuple[RunFlags, str]:
    """Returns flags whose epochs, image size and stages fit ``minutes``, and a summary.

    Flags given by the user do not change. A resumed run keeps the plan in its ``config.yaml``.

    Raises:
        UserError: the recipe has no ``SOLVER.EPOCHS``, the user also sets the epochs, or the time
            is too short for any training.
    """
    start, seconds = time.monotonic(), 60 * (flags.minutes or 0)
    flags = dataclasses.replace(RunFlags.read(flags), minutes=None)
    cfg, given = build_config(flags), flags.overrides
    if flags.resume and name_last_checkpoint(Path(cfg.OUTPUT_DIR)):
        return _read_plan(flags, cfg), "The run keeps the plan of its start"
    if not cfg.SOLVER.EPOCHS:
        raise UserError("--minutes plans runs by SOLVER.EPOCHS, which is 0: use --epochs")
    if "SOLVER.EPOCHS" in given:
        raise UserError("--minutes and --epochs both set the length: leave one out")
    pace, before = _measure(cfg, build_trainer), 0.0  # seconds of the first stage
    stage = find_first_stage(flags)
    has_first = stage is not None and is_done(stage)
    if stage and not has_first:
        stage_pace = _measure(build_config(stage), build_trainer)
        before = stage_pace.fixed + stage_pace.epoch * stage_pace.usual
    planned = _SHARE * seconds
    if find_job(cfg) == "boxes" and not cfg.MODEL.CACHE_FEATURES.ENABLED:
        size, freeze = _choose(cfg, pace, planned - before)
        size = flags.image_size if flags.image_size or _sets_size(given) else size
        freeze = freeze and not has_first and "MODEL.BACKBONE.FREEZE_AT" not in given
        if freeze and stage:  # only the first stage
            output = "" if "OUTPUT_DIR" in flags.opts else cfg.OUTPUT_DIR
            flags = dataclasses.replace(flags, config_file=stage.config_file, output=output)
            cfg, before = build_config(flags), 0.0
            pace = _measure(cfg, build_trainer)
        elif freeze or size != flags.image_size:
            flags = dataclasses.replace(flags, image_size=size, freeze=flags.freeze or freeze)
            pace = _measure(build_config(flags), build_trainer)
    left = comm.all_gather(planned - before - (time.monotonic() - start))[0]
    epochs = pace.count_epochs(left)
    if epochs < 0.01 * pace.usual:
        least = before + time.monotonic() - start + pace.fixed + 0.1 * pace.usual * pace.epoch
        needed = format_duration(least / _SHARE)
        raise UserError(f"--minutes {seconds / 60:g} is too short: this machine needs {needed}")
    chosen = dataclasses.replace(flags, epochs=float(f"{min(epochs, _MOST * pace.usual):.3g}"))
    return chosen, _explain(cfg, chosen, pace, seconds, before)


def _measure(cfg: CfgNode, build_trainer: Callable[[CfgNode], Trainer]) -> Pace:
    """Times a few steps and the evaluation of a few images; returns the same on all processes."""
    logging.disable(logging.WARNING)  # hides the results of a model that is hardly trained
    try:
        report = dry_run(cfg, build_trainer, num_steps=_NUM_STEPS)
    finally:
        logging.disable(logging.NOTSET)
    growing = sum(seconds * times for name, (seconds, times) in report.costs.items()
                  if name.startswith(("Step", "Evaluation")))  # fmt: skip
    usual = float(count_epochs(cfg, sum(len(DatasetCatalog.get(n)) for n in cfg.DATASETS.TRAIN)))
    fixed, epoch = comm.all_gather((report.total_seconds - growing, growing / usual))[0]
    return Pace(fixed, epoch, usual)


def _choose(cfg: CfgNode, pace: Pace, seconds: float) -> tuple[int | None, bool]:
    """Returns the image size (None for the recipe's size), and whether to freeze the backbone.

    Chooses the largest size that allows enough epochs. If no size does, chooses the smallest one.
    If that size allows less than ``_FEWEST`` of the recipe's epochs, keeps the recipe's size and
    freezes the backbone.
    """
    usual, epochs = max(cfg.INPUT.MIN_SIZE_TRAIN), pace.usual
    sizes = [round(share * usual / _STRIDE) * _STRIDE for share in _SIZES]
    affordable = {size: pace.count_epochs(seconds, (size / usual) ** 2) for size in sizes}
    enough = [size for size in sizes if affordable[size] >= _ENOUGH * epochs]
    if enough:
        return (None if max(enough) == usual else max(enough)), False
    freeze = affordable[sizes[0]] < _FEWEST * epochs
    return (None, True) if freeze else (sizes[0], False)


def _read_plan(flags: RunFlags, cfg: CfgNode) -> RunFlags:
    """Returns flags with the plan that the ``config.yaml`` in ``OUTPUT_DIR`` records."""
    saved = load_config(Path(cfg.OUTPUT_DIR) / "config.yaml")
    if saved.MODEL.CACHE_FEATURES.ENABLED:  # the plan had only the first stage
        config = cfg.SOLVER.FIRST_STAGE or flags.config_file
        return dataclasses.replace(flags, config_file=config, epochs=saved.SOLVER.EPOCHS)
    is_detector = find_job(saved) == "boxes"
    size = max(saved.INPUT.MIN_SIZE_TRAIN) if is_detector else saved.INPUT.PRETRAIN.SIZE
    freeze = saved.MODEL.BACKBONE.FREEZE_AT >= WHOLE_BACKBONE
    freeze = freeze and "MODEL.BACKBONE.FREEZE_AT" not in flags.opts
    size = None if _sets_size(flags.overrides) else size
    return dataclasses.replace(flags, epochs=saved.SOLVER.EPOCHS, image_size=size, freeze=freeze)


def _sets_size(overrides: Mapping[str, str]) -> bool:
    return any(f"INPUT.{key}" in overrides for key in SIZES)


def _explain(cfg: CfgNode, chosen: RunFlags, pace: Pace, seconds: float, before: float) -> str:
    """Returns a summary of the chosen flags and their speed; ``before`` is for the first stage."""
    words = f"--config-file {chosen.config_file} " if cfg.MODEL.CACHE_FEATURES.ENABLED else ""
    words += f"--epochs {chosen.epochs:g}"
    words += f" --image-size {chosen.image_size}" if chosen.image_size else ""
    words += " --freeze, as there is no time to train the backbone" if chosen.freeze else ""
    first = f" after a first stage of {format_duration(before)}" if before else ""
    return (
        f"Plan for {format_duration(seconds)}: {words}{first}; an epoch takes "
        f"{format_duration(pace.epoch)}, and the recipe has {pace.usual:g}"
    )

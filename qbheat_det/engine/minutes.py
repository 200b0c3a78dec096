# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fits the stages of a run to a number of minutes.

``--minutes`` chooses image size and epochs. Steps of the recipe are timed on this machine. Step
time is assumed to be proportional to the area of the images. The chosen size is timed too, which
determines the number of epochs. If it is slower than expected, a smaller size is tried.
"""

import functools
import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.utils import comm

from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_duration
from qbheat_det.feature_cache.filling import Fill, fill
from qbheat_det.solver import count_epochs

from .dry_run import BuildTrainer, dry_run
from .run import Stage
from .run_config import as_opts, list_shared_overrides
from .run_flags import RunFlags
from .run_record import name_last_checkpoint
from .trainer import Trainer

_SIZE_FACTORS = (2 / 3, 7 / 9, 1, 4 / 3, 16 / 9)  # on the recipe's shorter side
_STRIDE = 32
# Numbers of epochs, relative to the recipe's.
_ENOUGH_EPOCHS = 2 / 3  # that an image size must allow to be chosen
_MIN_EPOCHS = 1 / 3  # of a second stage; with fewer, only the first stage trains
_MAX_EPOCHS = 3
_MIN_EPOCHS_OF_RUN = 0.01
_NUM_STEPS = 24  # steps of a dry run, which times the second half
_USED_SHARE = 0.95  # planned share of the time, as the duration of steps varies


@dataclass(frozen=True)
class Pace:
    """The time of a stage.

    Attributes:
        fixed: seconds for everything except training steps and evaluation.
        epoch: seconds per epoch for training steps and evaluation.
        usual: the recipe's number of epochs.
        size: size in pixels of the largest images that were timed.
    """

    fixed: float
    epoch: float
    usual: float
    size: int

    @property
    def usual_seconds(self) -> float:
        """Duration of the stage with the recipe's number of epochs."""
        return self.fixed + self.epoch * self.usual

    def count_epochs(self, seconds: float, size: int | None = None) -> float:
        """Returns the number of epochs that fit in ``seconds`` with images of another ``size``."""
        area = 1.0
        if size:
            area = (size / self.size) ** 2
        return max(0.0, seconds - self.fixed) / (self.epoch * area)


def fit_minutes(
    stages: Sequence[Stage], flags: RunFlags, build_trainer: BuildTrainer
) -> list[Stage]:
    """Returns the stages with epochs and image size that fit ``flags.minutes``.

    The title of the first returned stage explains the plan. Values given by the user do not change.
    If there is no time for a second stage, only the first one is returned, in the folder of the
    run. A resumed run keeps the plan in its ``config.yaml``.

    Args:
        stages: stages of the run, see ``assemble_run``.
        flags: flags of the run.
        build_trainer: builds a trainer, such as ``Trainer``.

    Raises:
        UserError: the recipe has no ``SOLVER.EPOCHS``, the user also sets the epochs, or the time
            is too short for any training.
    """
    start = time.monotonic()
    minutes = flags.minutes or 0.0
    seconds = 60 * minutes
    last = stages[-1]
    is_resumed = last.resume and bool(name_last_checkpoint(last.folder))
    if not is_resumed and not last.cfg.SOLVER.EPOCHS:
        raise UserError("--minutes plans SOLVER.EPOCHS, which is 0: leave out SOLVER.MAX_ITER")
    if "SOLVER.EPOCHS" in flags.overrides:
        raise UserError("--minutes and --epochs both set the length: leave one out")
    if is_resumed:
        return [_read_plan(last, flags)]

    deadline = _Deadline(start, minutes)

    def build_timed_trainer(cfg: CfgNode, *, fill: Fill = fill) -> Trainer:
        trainer = build_trainer(cfg, fill=fill)
        trainer.register_hooks([deadline])
        return trainer

    measure = functools.partial(_measure, build_trainer=build_timed_trainer)
    pace = measure(last)
    first = _find_unfinished_first_stage(stages)
    first_seconds = 0.0
    min_epochs = 0.0
    if first is not None:
        first_seconds = measure(first).usual_seconds
        min_epochs = _MIN_EPOCHS * pace.usual
    sizes = _list_sizes(last, flags, pace)
    seconds_left = _USED_SHARE * seconds - first_seconds
    size, pace = _choose_size(last, pace, sizes, seconds_left, min_epochs, measure)

    is_first_alone = first is not None and size is None
    if first is not None and size is None:
        chosen = replace(first.with_values({"OUTPUT_DIR": last.cfg.OUTPUT_DIR}), title="")
        chosen_pace = measure(chosen)
        seconds_before = 0.0
    else:
        chosen = _resize(last, size)
        chosen_pace = pace
        seconds_before = first_seconds
    spent = comm.all_gather(time.monotonic() - start)[0]
    epochs = chosen_pace.count_epochs(_USED_SHARE * seconds - seconds_before - spent)
    if epochs < _MIN_EPOCHS_OF_RUN * chosen_pace.usual:
        training = chosen_pace.fixed + 0.1 * chosen_pace.usual * chosen_pace.epoch
        needed = format_duration((seconds_before + spent + training) / _USED_SHARE)
        raise UserError(f"--minutes {minutes:g} is too short: this machine needs {needed}")
    epochs = float(f"{min(epochs, _MAX_EPOCHS * chosen_pace.usual):.3g}")
    values: dict[str, Any] = {"SOLVER.EPOCHS": epochs}
    if "SOLVER.MIN_ITER" not in flags.overrides:
        values["SOLVER.MIN_ITER"] = 0  # exactly this number of epochs
    chosen = chosen.with_values(values)

    plan = f"Plan for {format_duration(seconds)}: "
    if is_first_alone:
        plan += f"only the first stage fits, {last.cfg.SOLVER.FIRST_STAGE}, with "
        plan += _describe_length(epochs, None, chosen_pace)
    else:
        is_resized = size != last.data.task.get_image_size(last.cfg)
        shown_size = flags.image_size
        if is_resized:
            shown_size = size
        plan += _describe_length(epochs, shown_size, chosen_pace, seconds_before)
        if chosen_pace.size < max(sizes):
            plan += f"; larger images would allow fewer than {_ENOUGH_EPOCHS * pace.usual:.3g}"
    plan += _describe_twice(sizes, pace, 2 * _USED_SHARE * seconds - first_seconds - spent)
    planned = [chosen]
    if not is_first_alone:
        planned = [*stages[:-1], chosen]
    title = "\n".join(filter(None, [plan, planned[0].title]))
    return [replace(planned[0], title=title), *planned[1:]]


def _read_plan(stage: Stage, flags: RunFlags) -> Stage:
    """Returns a resumed stage with the plan that the ``config.yaml`` in its folder records."""
    overrides = list_shared_overrides(flags.overrides)
    saved = load_config(stage.folder / "config.yaml", as_opts(overrides))
    values: dict[str, Any] = {
        "SOLVER.EPOCHS": saved.SOLVER.EPOCHS,
        "SOLVER.MAX_ITER": saved.SOLVER.MAX_ITER,
        "SOLVER.MIN_ITER": saved.SOLVER.MIN_ITER,
        "OUTPUT_DIR": stage.cfg.OUTPUT_DIR,
        "MODEL.DEVICE": stage.cfg.MODEL.DEVICE,
    }
    if saved.MODEL.CACHE_FEATURES.ENABLED and not stage.cfg.MODEL.CACHE_FEATURES.ENABLED:
        saved.freeze()  # the plan had only the first stage
        stage = replace(stage, cfg=saved)
    elif not _names_size(flags, stage):
        task = stage.data.task
        values |= task.get_size_values(stage.cfg, task.get_image_size(saved))
    title = "The run keeps its length and image size"
    return replace(stage.with_values(values), title=title)


def _find_unfinished_first_stage(stages: Sequence[Stage]) -> Stage | None:
    """Returns the first of two stages, unless it is finished."""
    if len(stages) == 1:
        return None
    first = stages[0]
    if first.resume and first.final_weights.is_file():
        return None
    return first


def _list_sizes(stage: Stage, flags: RunFlags, pace: Pace) -> list[int]:
    """Returns the image sizes to choose from."""
    is_fixed = stage.cfg.MODEL.CACHE_FEATURES.ENABLED or _names_size(flags, stage)
    if is_fixed or not stage.data.task.uses_boxes:
        return [pace.size]
    return [round(factor * pace.size / _STRIDE) * _STRIDE for factor in _SIZE_FACTORS]


def _names_size(flags: RunFlags, stage: Stage) -> bool:
    """Returns whether the user has set the image size."""
    keys = stage.data.task.size_keys
    return flags.image_size is not None or any(key in flags.overrides for key in keys)


def _choose_size(
    stage: Stage,
    pace: Pace,
    sizes: Sequence[int],
    seconds: float,
    min_epochs: float,
    measure: Callable[[Stage], Pace],
) -> tuple[int | None, Pace]:
    """Chooses the image size of a stage of ``seconds``, and times it.

    If the timed steps are slower than expected, chooses again among the smaller sizes.

    Returns:
        The size, or None if it allows fewer than ``min_epochs`` epochs, and the last pace.
    """
    while True:
        size = _find_largest(sizes, pace, seconds)
        if pace.count_epochs(seconds, size) < min_epochs:
            return None, pace
        if size == pace.size:
            return size, pace
        pace = measure(_resize(stage, size))
        sizes = [smaller for smaller in sizes if smaller <= size]


def _find_largest(sizes: Sequence[int], pace: Pace, seconds: float) -> int:
    """Returns the largest size that allows enough of the recipe's epochs, or the smallest size."""
    enough = [
        size for size in sizes if pace.count_epochs(seconds, size) >= _ENOUGH_EPOCHS * pace.usual
    ]
    return max(enough, default=min(sizes))


def _resize(stage: Stage, size: int | None) -> Stage:
    """Returns a stage with another image size, unless it is the same."""
    task = stage.data.task
    if size is None or size == task.get_image_size(stage.cfg):
        return stage
    return stage.with_values(task.get_size_values(stage.cfg, size))


class _Deadline(HookBase):
    """Raises a ``UserError`` if a step ends more than ``minutes`` after ``start``.

    ``start`` is in seconds of the monotonic clock.
    """

    def __init__(self, start: float, minutes: float) -> None:
        self._end = start + 60 * minutes
        self._minutes = minutes

    def after_step(self) -> None:
        if comm.all_gather(time.monotonic())[0] > self._end:
            raise UserError(
                f"--minutes {self._minutes:g} is too short: timing a few steps takes longer; set "
                "--epochs instead"
            )


def _measure(stage: Stage, build_trainer: BuildTrainer) -> Pace:
    """Times a few steps and the evaluation of a few images; returns the same on all processes."""
    cfg = stage.cfg
    logging.disable(logging.WARNING)  # hides the results of a model that is hardly trained
    try:
        report = dry_run(cfg, build_trainer, num_steps=_NUM_STEPS)
    finally:
        logging.disable(logging.NOTSET)
    gc.collect()  # a trainer refers to itself, and keeps its memory until then
    growing = 0.0
    for name, (seconds, times) in report.costs.items():
        if name.startswith(("Step", "Evaluation")):
            growing += seconds * times
    usual = float(count_epochs(cfg, stage.data.count_training_images()))
    fixed = report.total_seconds - growing
    fixed, epoch = comm.all_gather((fixed, growing / usual))[0]
    return Pace(fixed, epoch, usual, stage.data.task.get_image_size(cfg))


def _describe_length(
    epochs: float, image_size: int | None, pace: Pace, seconds_before: float = 0.0
) -> str:
    """Describes a planned stage. ``seconds_before`` is the duration of the first stage."""
    text = f"--epochs {epochs:g}"
    if image_size:
        text += f" --image-size {image_size}"
    if seconds_before:
        text += f" after a first stage of {format_duration(seconds_before)}"
    text += f"; an epoch takes {format_duration(pace.epoch)}"
    return text + f". The recipe has {pace.usual:.3g} epochs"


def _describe_twice(sizes: Sequence[int], pace: Pace, seconds: float) -> str:
    """Describes the second stage that twice the time allows; "" if it is too short."""
    size = _find_largest(sizes, pace, seconds)
    epochs = pace.count_epochs(seconds, size)
    if epochs < _MIN_EPOCHS * pace.usual:
        return ""
    text = f". Twice the time allows --epochs {min(epochs, _MAX_EPOCHS * pace.usual):.0f}"
    if len(sizes) > 1:
        text += f" --image-size {size}"
    return text

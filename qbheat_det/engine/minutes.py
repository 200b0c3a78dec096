# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fits the stages of a run to a number of minutes.

``--minutes`` chooses stages, image size, cached views and epochs. For this, a few steps of each
stage are timed on this machine, in at most a tenth of the time. Step time is assumed to be
proportional to the area of the images. A plan that turns out to be wrong is corrected during the
run (``time_limit.py``), so every plan ends in a model.
"""

import gc
import logging
import time
from collections.abc import Sequence
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
from .time_limit import TimeLimit
from .trainer import Trainer

_SIZE_FACTORS = (2 / 3, 7 / 9, 1, 4 / 3, 16 / 9)  # on the recipe's shorter side
_STRIDE = 32
# Numbers of epochs, relative to the recipe's.
_ENOUGH_EPOCHS = 2 / 3  # that an image size must allow to be chosen
_FEW_EPOCHS = 1 / 3  # that a second stage, or several cached views of an image, must allow
_MAX_EPOCHS = 3
# Shares of the time.
_TIMING_SHARE = 0.08  # until which steps are timed; the last of them, and its evaluation, take time
_USED_SHARE = 0.95  # the rest is for the report
_NUM_STEPS = 24  # steps of a dry run, which times the second half
_MIN_STEPS = 100  # of a run that has no time; with fewer, a detector finds nothing
_LEAST_MINUTES = 0.5
_MAX_EXCESS = 10  # times the minutes that the least possible run may take


@dataclass(frozen=True)
class Pace:
    """The time of a stage.

    Attributes:
        fixed: seconds for everything except encoding, training steps and evaluation.
        encoding: seconds to encode the views that are not cached yet.
        epoch: seconds per epoch for training steps and evaluation.
        evaluation: seconds per evaluation.
        usual: the recipe's number of epochs.
        steps: number of steps per epoch.
    """

    fixed: float
    encoding: float
    epoch: float
    evaluation: float
    usual: float
    steps: float

    @property
    def usual_seconds(self) -> float:
        """Duration of the stage with the recipe's number of epochs."""
        return self.fixed + self.encoding + self.epoch * self.usual

    @property
    def min_epochs(self) -> float:
        """Fewest epochs of a run."""
        return min(self.usual, _MIN_STEPS / self.steps)

    def count_epochs(self, seconds: float) -> float:
        """Returns the number of epochs that fit in ``seconds``."""
        return max(0.0, seconds - self.fixed - self.encoding) / self.epoch

    def scale(self, *, area: float = 1.0, views: float = 1.0) -> "Pace":
        """Returns the pace with images of another area, or with another number of views."""
        return replace(
            self,
            epoch=self.epoch * area,
            evaluation=self.evaluation * area,
            encoding=self.encoding * views,
        )


def fit_minutes(
    stages: Sequence[Stage], flags: RunFlags, build_trainer: BuildTrainer
) -> list[Stage]:
    """Returns the stages with the epochs, views and image size that fit ``flags.minutes``.

    The title of the first returned stage explains the plan. Values given by the user do not change.
    If there is no time for a second stage, only the first one is returned, in the folder of the
    run. A resumed run keeps the plan in its ``config.yaml``.

    Args:
        stages: stages of the run, see ``assemble_run``.
        flags: flags of the run.
        build_trainer: builds a trainer, such as ``Trainer``.

    Raises:
        UserError: the recipe has no ``SOLVER.EPOCHS``, the user also sets the epochs, or the time
            is far too short for any training.
    """
    last = stages[-1]
    is_resumed = last.resume and bool(name_last_checkpoint(last.folder))
    if not is_resumed and not last.cfg.SOLVER.EPOCHS:
        raise UserError("--minutes plans SOLVER.EPOCHS, which is 0: leave out SOLVER.MAX_ITER")
    planner = _Planner(flags, build_trainer)
    if is_resumed:
        return [planner.read_plan(last)]
    first = _find_unfinished_first_stage(stages)
    if first is None:
        return [*stages[:-1], planner.plan_alone(last, planner.measure(last))]
    first_pace = planner.measure(first)
    planned = planner.plan_both(first, first_pace, last)
    if planned is not None:
        return planned
    name = last.cfg.SOLVER.FIRST_STAGE
    alone = replace(first.with_values({"OUTPUT_DIR": last.cfg.OUTPUT_DIR}), title="")
    return [planner.plan_alone(alone, first_pace, f"only the first stage fits, {name}, with ")]


class _Planner:
    """Times stages and plans them for a number of minutes that has begun."""

    def __init__(self, flags: RunFlags, build_trainer: BuildTrainer) -> None:
        self._start = time.monotonic()
        self._flags = flags
        self._overrides = flags.overrides
        self._minutes = flags.minutes or 0.0
        self._build_trainer = build_trainer
        if "SOLVER.EPOCHS" in self._overrides:
            raise UserError("--minutes and --epochs both set the length: leave one out")
        if self._minutes < _LEAST_MINUTES:
            raise UserError(
                f"--minutes {self._minutes:g} is too short: the least is {_LEAST_MINUTES:g}"
            )

    @property
    def _end(self) -> float:
        """When training must be done, on the clock of ``time.monotonic``."""
        return self._start + _USED_SHARE * 60 * self._minutes

    def _count_left(self) -> float:
        """Returns the seconds that are left for training; equal on all processes."""
        return comm.all_gather(self._end - time.monotonic())[0]

    def measure(self, stage: Stage) -> Pace | None:
        """Times a few steps and the evaluation of a few images; equal on all processes.

        Returns None if there is no time for a single step.
        """
        deadline = _Deadline(self._start + _TIMING_SHARE * 60 * self._minutes)

        def build_timed_trainer(cfg: CfgNode, *, fill: Fill = fill) -> Trainer:
            trainer = self._build_trainer(cfg, fill=fill)
            deadline.refuse_if_over()
            trainer.register_hooks([deadline])
            return trainer

        logging.disable(logging.WARNING)  # hides the results of a model that is hardly trained
        try:
            report = dry_run(stage.cfg, build_timed_trainer, num_steps=_NUM_STEPS)
        except _OutOfTime:
            return None
        finally:
            logging.disable(logging.NOTSET)
            gc.collect()  # a trainer refers to itself, and keeps its memory until then
        num_images = stage.data.count_training_images()
        usual = float(count_epochs(stage.cfg, num_images))
        pace = Pace(
            fixed=report.total_seconds - report.sum_costs("Step", "Evaluation", "Encoding"),
            encoding=report.sum_costs("Encoding"),
            epoch=report.sum_costs("Step", "Evaluation") / usual,
            evaluation=report.get_cost("Evaluation"),
            usual=usual,
            steps=num_images / stage.cfg.SOLVER.IMS_PER_BATCH,
        )
        return comm.all_gather(pace)[0]

    def plan_both(self, first: Stage, first_pace: Pace | None, last: Stage) -> list[Stage] | None:
        """Plans two stages, the first one as in its recipe; None if there is no time for both."""
        has_begun = first.resume and bool(name_last_checkpoint(first.folder))
        if first_pace is None:
            return None
        # Steps of a second stage take much longer than those on cached features.
        left = self._count_left() - first_pace.usual_seconds
        if left < first_pace.usual_seconds and not has_begun:
            return None
        pace = self.measure(last)
        if pace is None:
            return None
        left = self._count_left() - first_pace.usual_seconds
        size, pace = self._choose_size(last, pace, left)
        least = _FEW_EPOCHS * pace.usual
        if pace.count_epochs(left) < least and not has_begun:
            return None
        second = self._plan(
            _resize(last, size),
            pace,
            max(least, pace.count_epochs(left)),
            min_iter=1,  # it starts from a trained head
            needed=pace.fixed + least * pace.epoch,
        )
        first_limit = TimeLimit(
            end=self._end - left + 0.25 * first_pace.usual_seconds,  # in case it takes longer
            min_iter=_MIN_STEPS,
            evaluation=first_pace.evaluation,
        )
        shown_size = f" --image-size {size}" if size else ""
        plan = self._describe(second, pace, "", shown_size)
        plan += f", after a first stage of {format_duration(first_pace.usual_seconds)}"
        return [replace(first, limit=first_limit).with_title(plan), second]

    def plan_alone(self, stage: Stage, pace: Pace | None, reason: str = "") -> Stage:
        """Plans a run of one stage.

        Args:
            stage: the stage.
            pace: its time; None if there was no time to measure it.
            reason: why there is one stage, for the explanation.

        Raises:
            UserError: the least possible run takes far longer than the time.
        """
        left = self._count_left()
        if pace is None:
            return self._plan_blindly(stage, reason)
        shown = ""
        if stage.cfg.MODEL.CACHE_FEATURES.ENABLED:
            count, pace = self._choose_views(stage, pace, left)
            if count != stage.cfg.INPUT.FIXED_VIEWS.COUNT:
                plural = "" if count == 1 else "s"
                shown = f" and {count} cached view{plural} of each image"
            stage = stage.with_values({"INPUT.FIXED_VIEWS.COUNT": count})
        else:
            size, pace = self._choose_size(stage, pace, left)
            if size:
                shown = f" --image-size {size}"
            stage = _resize(stage, size)
        epochs = pace.count_epochs(left)
        planned = self._plan(stage, pace, max(epochs, pace.min_epochs))
        plan = self._describe(planned, pace, reason, shown)
        if epochs < pace.min_epochs:
            needed = pace.fixed + pace.encoding + pace.min_epochs * pace.epoch
            if needed > _MAX_EXCESS * 60 * self._minutes:
                raise UserError(
                    f"--minutes {self._minutes:g} is too short: the least that this machine can do "
                    f"takes {format_duration(needed)}"
                )
            plan += f". This is the least that can be done, and takes {format_duration(needed)}"
        return planned.with_title(plan)

    def _plan_blindly(self, stage: Stage, reason: str) -> Stage:
        """Plans a stage without knowing its time: as little as possible, until the time is over."""
        if stage.cfg.MODEL.CACHE_FEATURES.ENABLED:
            if "INPUT.FIXED_VIEWS.COUNT" not in self._overrides:
                stage = stage.with_values({"INPUT.FIXED_VIEWS.COUNT": 1})
        elif self._may_resize(stage):
            stage = _resize(stage, min(_list_sizes(stage)))
        stage = replace(stage, limit=TimeLimit(end=self._end, min_iter=_MIN_STEPS))
        plan = f"Plan for {format_duration(60 * self._minutes)}: {reason}as many epochs as fit"
        plan += ". This machine is too slow or too busy now to time its steps"
        return stage.with_title(plan)

    def _plan(
        self,
        stage: Stage,
        pace: Pace,
        epochs: float,
        *,
        min_iter: int = _MIN_STEPS,
        needed: float = 0.0,
    ) -> Stage:
        """Returns a stage with a number of epochs, at most three times the recipe's.

        ``min_iter`` and ``needed`` are for its ``TimeLimit``.
        """
        most = _MAX_EPOCHS * pace.usual
        epochs = float(f"{min(epochs, most):.3g}")
        values: dict[str, Any] = {"SOLVER.EPOCHS": epochs}
        if "SOLVER.MIN_ITER" not in self._overrides:
            values["SOLVER.MIN_ITER"] = 0  # exactly this number of epochs
        warmup = stage.cfg.SOLVER.WARMUP_EPOCHS
        if warmup and "SOLVER.WARMUP_EPOCHS" not in self._overrides:
            values["SOLVER.WARMUP_EPOCHS"] = min(1.0, epochs / pace.usual) * warmup
        limit = TimeLimit(
            end=self._end,
            min_iter=min_iter,
            max_growth=most / epochs,
            evaluation=pace.evaluation,
            needed=needed,
        )
        return replace(stage.with_values(values), limit=limit)

    def _choose_size(self, stage: Stage, pace: Pace, seconds: float) -> tuple[int | None, Pace]:
        """Chooses the largest image size that allows enough of the recipe's epochs.

        Returns:
            The size, or None for that of the config; and the pace with this size.
        """
        if not self._may_resize(stage):
            return None, pace
        usual_size = stage.data.task.get_image_size(stage.cfg)
        paces: dict[int, Pace] = {}
        for size in _list_sizes(stage):
            paces[size] = pace.scale(area=(size / usual_size) ** 2)
        enough = [
            size
            for size, scaled in paces.items()
            if scaled.count_epochs(seconds) >= _ENOUGH_EPOCHS * pace.usual
        ]
        chosen = max(enough, default=min(paces))
        if chosen == usual_size:
            return None, pace
        return chosen, paces[chosen]

    def _may_resize(self, stage: Stage) -> bool:
        """Returns whether the plan may change the image size of a stage."""
        is_cached = stage.cfg.MODEL.CACHE_FEATURES.ENABLED
        return stage.data.task.uses_boxes and not is_cached and not self._names_size(stage)

    def _names_size(self, stage: Stage) -> bool:
        """Returns whether the user has set the image size."""
        keys = stage.data.task.size_keys
        return self._flags.image_size is not None or any(key in self._overrides for key in keys)

    def _choose_views(self, stage: Stage, pace: Pace, seconds: float) -> tuple[int, Pace]:
        """Chooses how many views of each image are cached, and returns the pace with them."""
        usual = stage.cfg.INPUT.FIXED_VIEWS.COUNT
        if "INPUT.FIXED_VIEWS.COUNT" in self._overrides:
            return usual, pace
        count = usual
        while count > 1:
            scaled = pace.scale(views=count / usual)
            if scaled.count_epochs(seconds) >= _FEW_EPOCHS * pace.usual:
                break
            count //= 2
        return count, pace.scale(views=count / usual)

    def _describe(self, stage: Stage, pace: Pace, reason: str, shown: str) -> str:
        """Describes a planned stage."""
        text = f"Plan for {format_duration(60 * self._minutes)}: {reason}"
        text += f"--epochs {stage.cfg.SOLVER.EPOCHS:g}{shown} (the recipe has {pace.usual:.3g} "
        return text + f"epochs); an epoch takes {format_duration(pace.epoch)}"

    def read_plan(self, stage: Stage) -> Stage:
        """Returns a resumed stage with the plan that the ``config.yaml`` in its folder records."""
        overrides = list_shared_overrides(self._overrides)
        saved = load_config(stage.folder / "config.yaml", as_opts(overrides))
        values: dict[str, Any] = {
            "SOLVER.EPOCHS": saved.SOLVER.EPOCHS,
            "SOLVER.MAX_ITER": saved.SOLVER.MAX_ITER,
            "SOLVER.MIN_ITER": saved.SOLVER.MIN_ITER,
            "SOLVER.WARMUP_EPOCHS": saved.SOLVER.WARMUP_EPOCHS,
            "INPUT.FIXED_VIEWS.COUNT": saved.INPUT.FIXED_VIEWS.COUNT,
            "OUTPUT_DIR": stage.cfg.OUTPUT_DIR,
            "MODEL.DEVICE": stage.cfg.MODEL.DEVICE,
        }
        if saved.MODEL.CACHE_FEATURES.ENABLED and not stage.cfg.MODEL.CACHE_FEATURES.ENABLED:
            saved.freeze()  # the plan had only the first stage
            stage = replace(stage, cfg=saved)
        elif not self._names_size(stage):
            task = stage.data.task
            values |= task.get_size_values(stage.cfg, task.get_image_size(saved))
        # The checkpoint has the time that was left.
        limit = TimeLimit(end=self._end, min_iter=_MIN_STEPS, max_growth=_MAX_EPOCHS)
        title = "The run keeps its plan and the time that was left"
        return replace(stage.with_values(values), title=title, limit=limit)


def _find_unfinished_first_stage(stages: Sequence[Stage]) -> Stage | None:
    """Returns the first of two stages, unless it is finished."""
    if len(stages) == 1:
        return None
    first = stages[0]
    if first.resume and first.final_weights.is_file():
        return None
    return first


def _list_sizes(stage: Stage) -> list[int]:
    """Returns the image sizes to choose from."""
    size = stage.data.task.get_image_size(stage.cfg)
    return [round(factor * size / _STRIDE) * _STRIDE for factor in _SIZE_FACTORS]


def _resize(stage: Stage, size: int | None) -> Stage:
    """Returns a stage with another image size, unless it is None."""
    if size is None:
        return stage
    return stage.with_values(stage.data.task.get_size_values(stage.cfg, size))


class _OutOfTime(UserError):
    """No step could be timed."""


class _Deadline(HookBase):
    """Ends the timed steps at ``end``, in seconds of ``time.monotonic``."""

    def __init__(self, end: float) -> None:
        self._end = end

    def refuse_if_over(self) -> None:
        """Raises ``_OutOfTime`` on all processes if the time is over."""
        if self._is_over():
            raise _OutOfTime("--minutes: there is no time to time a step")

    def before_step(self) -> None:
        if self.trainer.iter == self.trainer.start_iter:
            self.refuse_if_over()
        elif self._is_over():
            self.trainer.max_iter = self.trainer.iter + 1  # this step is the last

    def _is_over(self) -> bool:
        return bool(comm.all_gather(time.monotonic() > self._end)[0])

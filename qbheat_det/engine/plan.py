# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Plans a run: its stages, and how long it trains.

``SOLVER.FIRST_STAGE`` names the config of a first stage, usually a head on cached features of a
frozen encoder, which trains in minutes. The second stage also trains the encoder. Each stage is a
run in a folder of its own.

``--minutes`` chooses image size and epochs. Steps of the recipe are timed on this machine. Step
time is assumed to be proportional to the area of the images. The chosen size is timed too, which
determines the number of epochs. If it is slower than expected, a smaller size is tried.
"""

import dataclasses
import functools
import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.engine import HookBase
from detectron2.utils import comm

from qbheat_det.checkpoint import holds_encoder
from qbheat_det.config import get_value, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_duration
from qbheat_det.solver import count_epochs

from .dry_run import dry_run
from .resume import decide_to_resume, name_last_checkpoint
from .run_flags import FIRST_STAGE_WEIGHTS, SIZES, RunFlags, find_job
from .setup import build_config
from .trainer import Trainer

# Overrides that both stages share; all others are for the second stage.
_SHARED = ("DATALOADER.", "DATASETS.", "FLOAT32_PRECISION", "INPUT.FORMAT", "INPUT.TILE", "MODEL.",
           "SEED", "SOLVER.AMP.")  # fmt: skip
_OWN = ("DATASETS.UNLABELLED", "MODEL.BACKBONE.FREEZE_AT", "MODEL.CACHE_FEATURES.ENABLED",
        "MODEL.SEMI.")  # fmt: skip
_FROZEN = 5  # lowest FREEZE_AT of recipes with a frozen backbone
# Keys that must be equal in both stages, so that the weights fit.
_EQUAL = ("MODEL.META_ARCHITECTURE", "MODEL.BACKBONE.NAME", "MODEL.FPN.BOTTOM_UP",
          "MODEL.FPN.OUT_CHANNELS")  # fmt: skip

_SIZES = (2 / 3, 7 / 9, 1, 4 / 3, 16 / 9)  # factors on the recipe's shorter side
_STRIDE = 32
_ENOUGH = 2 / 3  # share of the recipe's epochs that an image size must allow to be chosen
_FEWEST, _MOST = 1 / 3, 3  # times the recipe's epochs; below _FEWEST, only the first stage trains
_NUM_STEPS = 24  # steps of a dry run, which times the second half
_SHARE = 0.95  # planned share of the time, as the duration of steps varies
BuildTrainer = Callable[[CfgNode], Trainer]


def find_first_stage(flags: RunFlags) -> RunFlags | None:
    """Returns the flags of the first stage, or None if the run has none.

    Both stages have the same data, device and model. If ``--weights`` names an encoder, both use
    it. There is no first stage if the command evaluates, freezes the backbone or names weights of a
    detector. There is none either if the second stage has a checkpoint. The first stage is resumed
    under the same conditions as other runs. All processes must call this function.

    Raises:
        UserError: the first stage's config is invalid, is for another model, or has a first stage.
    """
    cfg = flags.load_config()
    if not cfg.SOLVER.FIRST_STAGE or flags.eval_only:
        return None
    weights = flags.overrides.get("MODEL.WEIGHTS")
    if weights is not None and not (weights and holds_encoder(weights)):
        return None
    folder = Path(cfg.OUTPUT_DIR)
    if cfg.MODEL.BACKBONE.FREEZE_AT >= _FROZEN or name_last_checkpoint(folder):
        return None
    stage = _derive_first_stage(flags, cfg)
    _check_stage(stage, cfg)
    stage.resume = decide_to_resume(stage)
    return stage


def _derive_first_stage(flags: RunFlags, cfg: CfgNode) -> RunFlags:
    """Returns flags with the config of the first stage, without what is for the second one."""
    shared = {
        k: v for k, v in flags.overrides.items() if k.startswith(_SHARED) and not k.startswith(_OWN)
    }
    return dataclasses.replace(
        flags,
        config_file=cfg.SOLVER.FIRST_STAGE,
        weights="",
        output=str((Path(cfg.OUTPUT_DIR) / FIRST_STAGE_WEIGHTS).parent),
        unlabelled=(),
        device="",
        epochs=None,
        batch=None,
        image_size=None,
        tile=None,
        opts=[text for pair in shared.items() for text in pair],
    )


def _check_stage(stage: RunFlags, cfg: CfgNode) -> None:
    """Raises a ``UserError`` if the weights of a first stage would not fit ``cfg``."""
    name = f"SOLVER.FIRST_STAGE '{stage.config_file}'"
    try:
        first = stage.load_config()
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    if first.SOLVER.FIRST_STAGE:
        raise UserError(f"{name} has a SOLVER.FIRST_STAGE itself, but a run has two stages at most")
    if find_job(first) != find_job(cfg):
        raise UserError(f"{name} trains on {find_job(first)}, but the run on {find_job(cfg)}")
    for key in _EQUAL:
        one, other = get_value(first, key), get_value(cfg, key)
        if one != other:
            raise UserError(f"{name} has {key} {one}, but the run has {other}")


def _find_weights(stage: RunFlags) -> Path:
    return Path(stage.output) / FIRST_STAGE_WEIGHTS.name


def start_from(stage: RunFlags, flags: RunFlags) -> RunFlags:
    """Returns the flags of the second stage, which starts from the weights of the first one."""
    config, opts = flags.config_file or flags.name_default_config(), list(flags.opts)
    if "MODEL.WEIGHTS" in opts[::2]:
        start = 2 * opts[::2].index("MODEL.WEIGHTS")
        del opts[start : start + 2]
    weights = str(_find_weights(stage))
    return dataclasses.replace(flags, config_file=config, weights=weights, resume=False, opts=opts)


@dataclass(frozen=True)
class Pace:
    """The time of a run.

    Attributes:
        fixed: seconds for everything except training steps and evaluation.
        epoch: seconds per epoch for training steps and evaluation.
        usual: the recipe's number of epochs.
        size: shorter side in pixels of the largest images that were timed.
    """

    fixed: float
    epoch: float
    usual: float
    size: int

    def count_epochs(self, seconds: float, size: int | None = None) -> float:
        """Returns the number of epochs that fit in ``seconds`` with images of another ``size``."""
        area = (size / self.size) ** 2 if size else 1.0
        return max(0.0, seconds - self.fixed) / (self.epoch * area)


def plan_run(flags: RunFlags, build_trainer: BuildTrainer) -> tuple[RunFlags, str]:
    """Returns flags whose epochs, image size and stages fit ``flags.minutes``, and a summary.

    Flags given by the user do not change, except that ``config_file`` becomes the config of the
    first stage if there is no time for a second one. A resumed run keeps the plan in its
    ``config.yaml``.

    Raises:
        UserError: the recipe has no ``SOLVER.EPOCHS``, the user also sets the epochs, or the time
            is too short for any training.
    """
    start, seconds = time.monotonic(), 60 * (flags.minutes or 0)
    deadline = _Deadline(start, seconds / 60)
    build_trainer = functools.partial(_build_until, deadline, build_trainer)
    flags = dataclasses.replace(flags, minutes=None)
    cfg, given = build_config(flags), flags.overrides
    if flags.resume and name_last_checkpoint(Path(cfg.OUTPUT_DIR)):
        return _read_plan(flags, cfg), "The run keeps its length and image size"
    if not cfg.SOLVER.EPOCHS:
        raise UserError("--minutes plans SOLVER.EPOCHS, which is 0: leave out SOLVER.MAX_ITER")
    if "SOLVER.EPOCHS" in given:
        raise UserError("--minutes and --epochs both set the length: leave one out")
    measure = functools.partial(_measure, build_trainer=build_trainer)
    pace, before = measure(cfg), 0.0  # seconds of the first stage
    stage = find_first_stage(flags)
    if stage and stage.resume and _find_weights(stage).is_file():
        stage = None
    if stage:
        first = measure(build_config(stage))
        before = first.fixed + first.epoch * first.usual
    sizes = [pace.size]
    if find_job(cfg) == "boxes" and not (
        cfg.MODEL.CACHE_FEATURES.ENABLED or flags.image_size or _sets_size(given)
    ):
        sizes = [round(share * pace.size / _STRIDE) * _STRIDE for share in _SIZES]
    least = _FEWEST * pace.usual if stage else 0.0
    resized, pace = _choose_size(flags, pace, sizes, _SHARE * seconds - before, least, measure)
    if resized:
        flags, planned, first_seconds = resized, pace, before
    else:  # only the first stage
        flags = dataclasses.replace(_derive_first_stage(flags, cfg), output=cfg.OUTPUT_DIR)
        planned, first_seconds = measure(build_config(flags)), 0.0
    spent = comm.all_gather(time.monotonic() - start)[0]
    epochs = planned.count_epochs(_SHARE * seconds - first_seconds - spent)
    if epochs < 0.01 * planned.usual:
        least = first_seconds + spent + planned.fixed + 0.1 * planned.usual * planned.epoch
        needed = format_duration(least / _SHARE)
        raise UserError(f"--minutes {seconds / 60:g} is too short: this machine needs {needed}")
    chosen = dataclasses.replace(flags, epochs=float(f"{min(epochs, _MOST * planned.usual):.3g}"))
    summary = _explain(chosen, planned, sizes if resized else (), seconds, first_seconds)
    return chosen, summary + _explain_twice(sizes, pace, 2 * _SHARE * seconds - before - spent)


def _choose_size(
    flags: RunFlags,
    pace: Pace,
    sizes: Sequence[int],
    seconds: float,
    least: float,
    measure: Callable[[CfgNode], Pace],
) -> tuple[RunFlags | None, Pace]:
    """Chooses the image size of a run of ``seconds``, and times it.

    If the timed steps are slower than expected, chooses again among the smaller sizes.

    Returns:
        Flags with the size, or None if it allows fewer than ``least`` epochs, and the last pace.
    """
    usual = pace.size
    while True:
        size = _fit(sizes, pace, seconds)
        if pace.count_epochs(seconds, size) < least:
            return None, pace
        if size == pace.size:
            return flags, pace
        flags = dataclasses.replace(flags, image_size=None if size == usual else size)
        pace = measure(build_config(flags))
        sizes = [one for one in sizes if one <= size]


def _fit(sizes: Sequence[int], pace: Pace, seconds: float) -> int:
    """Returns the largest size that allows ``_ENOUGH`` of the recipe's epochs, or the smallest."""
    enough = (s for s in sizes if pace.count_epochs(seconds, s) >= _ENOUGH * pace.usual)
    return max(enough, default=min(sizes))


class _Deadline(HookBase):
    """Raises a ``UserError`` if a step ends more than ``minutes`` after ``start``.

    ``start`` is in seconds of the monotonic clock.
    """

    def __init__(self, start: float, minutes: float) -> None:
        self._end, self._minutes = start + 60 * minutes, minutes

    def after_step(self) -> None:
        if comm.all_gather(time.monotonic())[0] > self._end:
            raise UserError(
                f"--minutes {self._minutes:g} is too short: timing a few steps takes longer; set "
                "--epochs instead"
            )


def _build_until(deadline: _Deadline, build_trainer: BuildTrainer, cfg: CfgNode) -> Trainer:
    trainer = build_trainer(cfg)
    trainer.register_hooks([deadline])
    return trainer


def _measure(cfg: CfgNode, build_trainer: BuildTrainer) -> Pace:
    """Times a few steps and the evaluation of a few images; returns the same on all processes."""
    logging.disable(logging.WARNING)  # hides the results of a model that is hardly trained
    try:
        report = dry_run(cfg, build_trainer, num_steps=_NUM_STEPS)
    finally:
        logging.disable(logging.NOTSET)
    gc.collect()  # a trainer refers to itself, and keeps its memory until then
    growing = sum(seconds * times for name, (seconds, times) in report.costs.items()
                  if name.startswith(("Step", "Evaluation")))  # fmt: skip
    usual = float(count_epochs(cfg, sum(len(DatasetCatalog.get(n)) for n in cfg.DATASETS.TRAIN)))
    fixed, epoch = comm.all_gather((report.total_seconds - growing, growing / usual))[0]
    return Pace(fixed, epoch, usual, max(cfg.INPUT.MIN_SIZE_TRAIN))


def _explain_twice(sizes: Sequence[int], pace: Pace, seconds: float) -> str:
    """Describes the second stage that twice the time allows; "" if it is too short."""
    size = _fit(sizes, pace, seconds)
    epochs = pace.count_epochs(seconds, size)
    if epochs < _FEWEST * pace.usual:
        return ""
    words = f". Twice the time allows --epochs {min(epochs, _MOST * pace.usual):.0f}"
    return words + (f" --image-size {size}" if len(sizes) > 1 else "")


def _read_plan(flags: RunFlags, cfg: CfgNode) -> RunFlags:
    """Returns flags with the plan that the ``config.yaml`` in ``OUTPUT_DIR`` records."""
    saved = load_config(Path(cfg.OUTPUT_DIR) / "config.yaml")
    flags = dataclasses.replace(flags, epochs=saved.SOLVER.EPOCHS)
    if saved.MODEL.CACHE_FEATURES.ENABLED:  # the plan had only the first stage
        first = _derive_first_stage(flags, cfg) if cfg.SOLVER.FIRST_STAGE else flags
        return dataclasses.replace(first, output=cfg.OUTPUT_DIR, epochs=saved.SOLVER.EPOCHS)
    is_detector = find_job(saved) == "boxes"
    size = max(saved.INPUT.MIN_SIZE_TRAIN) if is_detector else saved.INPUT.PRETRAIN.SIZE
    return dataclasses.replace(flags, image_size=None if _sets_size(flags.overrides) else size)


def _sets_size(overrides: Mapping[str, str]) -> bool:
    return any(f"INPUT.{key}" in overrides for key in SIZES)


def _explain(
    chosen: RunFlags, pace: Pace, sizes: Sequence[int], seconds: float, before: float
) -> str:
    """Returns a summary of the plan. ``before`` is the duration of the first stage in seconds.

    ``sizes`` are the image sizes from which one was chosen; empty for a first stage alone.
    """
    words = "" if sizes else f"only the first stage fits, {chosen.config_file}, with "
    words += f"--epochs {chosen.epochs:g}"
    words += f" --image-size {chosen.image_size}" if chosen.image_size else ""
    words += f" after a first stage of {format_duration(before)}" if before else ""
    words += f"; an epoch takes {format_duration(pace.epoch)}"
    words += f". The recipe has {pace.usual:.3g} epochs"
    if pace.size < max(sizes, default=0):
        words += f"; larger images would allow fewer than {_ENOUGH * pace.usual:.3g}"
    return f"Plan for {format_duration(seconds)}: {words}"

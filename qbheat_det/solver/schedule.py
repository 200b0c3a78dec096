# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Schedules: converts epochs to iterations, and scales the learning rate by the batch size."""

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.solver import LRMultiplier
from detectron2.solver import build as detectron2_build
from torch import nn
from torch.optim import Optimizer

from qbheat_det.config import Rules, at_least, check_values, one_of, with_values
from qbheat_det.core.errors import UserError

# Maps the ratio of the batch size to the reference batch size to a factor on the learning rate.
_LR_SCALING: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
_SCHEDULERS = ("WarmupMultiStepLR", "WarmupCosineLR", "WarmupStepWithFixedGammaLR")


def _is_number_of_epochs(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf  # type: ignore[operator]


def _are_rising_epochs(values: Any) -> bool:
    """Whether all values are above 0, and each is above the value before it."""
    if not all(_is_number_of_epochs(value) for value in values):
        return False
    return all(low < high for low, high in itertools.pairwise([0, *values]))


_EPOCHS = (_is_number_of_epochs, "a number of epochs from 0 on")
_EPOCHS_OR_NONE = (
    lambda value: value is None or _is_number_of_epochs(value),
    "a number of epochs (0 for no warm-up), or None for SOLVER.WARMUP_ITERS",
)
_EPOCH_RULES: Rules = {
    "SOLVER.IMS_PER_BATCH": at_least(1),
    "SOLVER.REFERENCE_BATCH_SIZE": (
        lambda value: value >= 0,
        "the batch size that SOLVER.BASE_LR is meant for, or 0 for no scaling",
    ),
    "SOLVER.LR_SCALING": one_of(*_LR_SCALING),
    "SOLVER.REFERENCE_WORLD_SIZE": (
        lambda value: value == 0,
        "0: give the batch of a step as SOLVER.IMS_PER_BATCH, whatever the number of processes",
    ),
    "SOLVER.BASE_LR": (lambda value: 0 < value < math.inf, "a number above 0"),
    "SOLVER.STEP_EPOCHS": (_are_rising_epochs, "epochs that rise from above 0"),
    "SOLVER.EPOCHS": _EPOCHS,
    "SOLVER.MIN_ITER": at_least(0),
    "SOLVER.WARMUP_EPOCHS": _EPOCHS_OR_NONE,
    "SOLVER.CHECKPOINT_EPOCHS": _EPOCHS,
    "TEST.EVAL_EPOCHS": _EPOCHS,
}
_ITERATION_RULES: Rules = {
    "SOLVER.LR_SCHEDULER_NAME": one_of(*_SCHEDULERS),
    "SOLVER.WARMUP_METHOD": one_of("linear", "constant"),
    "SOLVER.WARMUP_FACTOR": at_least(0),
    "SOLVER.WARMUP_ITERS": at_least(0),
    "SOLVER.MAX_ITER": at_least(1),
    "SOLVER.CHECKPOINT_PERIOD": at_least(1),
    "TEST.EVAL_PERIOD": at_least(0),
}


def resolve_schedule(cfg: CfgNode, *, num_images: int) -> CfgNode:
    """Converts epochs to iterations, and scales the learning rate by the batch size.

    An epoch is ``num_images / SOLVER.IMS_PER_BATCH`` iterations. Iterations are rounded up. If
    ``SOLVER.EPOCHS`` would give fewer than ``SOLVER.MIN_ITER`` iterations, the whole schedule is
    stretched by one factor, so that ``MAX_ITER`` is ``MIN_ITER``. ``SOLVER.BASE_LR`` is multiplied
    by the ratio of the batch size to ``SOLVER.REFERENCE_BATCH_SIZE``, or by the square root of this
    ratio (``SOLVER.LR_SCALING``).

    Keys whose values are epochs do not change. ``SOLVER.REFERENCE_BATCH_SIZE`` becomes the batch
    size. Therefore resolving the result again changes nothing, and the result can be resolved for
    another batch size or other data.

    Args:
        cfg: config of a run.
        num_images: number of training images after the filters of ``DATALOADER``.

    Returns:
        A copy of ``cfg``, which is frozen if ``cfg`` is frozen.

    Raises:
        UserError: a value of the schedule is invalid.
    """
    if num_images < 1:
        raise UserError(f"there are {num_images} images to train on: DATASETS.TRAIN is empty")
    check_values(cfg, _EPOCH_RULES)
    resolved = with_values(cfg)
    solver = resolved.SOLVER
    stretch = Fraction(1)  # above 1 if SOLVER.MIN_ITER makes the run longer
    if solver.EPOCHS:
        stretch = count_epochs(cfg, num_images) / _exact(solver.EPOCHS)

    def to_iterations(epochs: float) -> int:
        return math.ceil(_exact(epochs) * num_images / solver.IMS_PER_BATCH * stretch)

    if solver.EPOCHS:
        solver.MAX_ITER = to_iterations(solver.EPOCHS)
    if solver.WARMUP_EPOCHS is not None:
        solver.WARMUP_ITERS = to_iterations(solver.WARMUP_EPOCHS)
    if solver.CHECKPOINT_EPOCHS:
        solver.CHECKPOINT_PERIOD = to_iterations(solver.CHECKPOINT_EPOCHS)
    if resolved.TEST.EVAL_EPOCHS:
        resolved.TEST.EVAL_PERIOD = to_iterations(resolved.TEST.EVAL_EPOCHS)
    if solver.STEP_EPOCHS:
        solver.STEPS = tuple(to_iterations(epochs) for epochs in solver.STEP_EPOCHS)
    if solver.REFERENCE_BATCH_SIZE:
        scale = _LR_SCALING[solver.LR_SCALING]
        factor = scale(solver.IMS_PER_BATCH / solver.REFERENCE_BATCH_SIZE)
        solver.BASE_LR *= factor
        if "BASE_LR_END" in solver:  # for cosine schedules; Detectron2 v0.6 has no such key
            solver.BASE_LR_END *= factor
        solver.REFERENCE_BATCH_SIZE = solver.IMS_PER_BATCH
    check_values(resolved, _ITERATION_RULES)
    steps = _effective_steps(resolved)
    if any(low >= high for low, high in itertools.pairwise([0, *steps])):
        raise UserError(
            f"SOLVER.STEPS must rise from above 0, not {tuple(solver.STEPS)}. They are iterations "
            f"of {solver.IMS_PER_BATCH} images, so steps in epochs may coincide for few images"
        )
    if cfg.is_frozen():
        resolved.freeze()
    return resolved


def count_epochs(cfg: CfgNode, num_images: int) -> Fraction:
    """Returns the larger of ``SOLVER.EPOCHS`` and the epochs in ``SOLVER.MIN_ITER`` iterations."""
    min_epochs = Fraction(cfg.SOLVER.MIN_ITER * cfg.SOLVER.IMS_PER_BATCH, num_images)
    return max(_exact(cfg.SOLVER.EPOCHS), min_epochs)


def _exact(epochs: float) -> Fraction:
    """Returns the value of a float as it is written, so 0.1 epochs of 30 images are 3 images."""
    return Fraction(repr(epochs))


def describe_schedule(cfg: CfgNode, resolved: CfgNode, num_images: int) -> str:
    """Returns a description of a run's schedule in several lines, for the log.

    Args:
        cfg: config of the run.
        resolved: the result of ``resolve_schedule`` for ``cfg``.
        num_images: number of training images.
    """
    solver = resolved.SOLVER
    period = resolved.TEST.EVAL_PERIOD
    iterations_per_epoch = num_images / solver.IMS_PER_BATCH

    def spell(iterations: int) -> str:
        epochs = iterations / iterations_per_epoch
        form = ",.0f" if epochs >= 100 else ".3g"
        return f"{iterations:,} iterations ({epochs:{form}} epochs)"

    evaluations = "at the end"
    if period:
        evaluations = f"every {spell(period)} and at the end"
    lines = [
        f"Schedule: {spell(solver.MAX_ITER)}, with {solver.IMS_PER_BATCH:,} images an iteration "
        f"and {num_images:,} images an epoch",
        f"Checkpoints every {spell(solver.CHECKPOINT_PERIOD)}, evaluation {evaluations}",
        f"Learning rate: {', '.join(_describe_rate(cfg, resolved, spell))}",
    ]
    if 2 * solver.WARMUP_ITERS > solver.MAX_ITER:
        lines.append(
            f"Note: the warm-up takes {solver.WARMUP_ITERS:,} of {solver.MAX_ITER:,} iterations: "
            "lower SOLVER.WARMUP_EPOCHS or SOLVER.WARMUP_ITERS, or train for longer"
        )
    return "\n".join(lines)


def _describe_rate(cfg: CfgNode, resolved: CfgNode, spell: Callable[[int], str]) -> Iterator[str]:
    """Yields the learning rate of a run, its course, and its factors for parts of the model.

    The first two arguments are those of ``describe_schedule``. ``spell`` describes a number of
    iterations.
    """
    solver = resolved.SOLVER
    rate = f"{solver.BASE_LR:.6g}"
    if solver.BASE_LR != cfg.SOLVER.BASE_LR:
        rate += (
            f" ({cfg.SOLVER.BASE_LR:g} for {cfg.SOLVER.REFERENCE_BATCH_SIZE:,} images a step, "
            f"{solver.LR_SCALING} scaling)"
        )
    yield rate
    if solver.WARMUP_ITERS and solver.WARMUP_FACTOR != 1:
        warmup = f"{solver.WARMUP_METHOD} warm-up from x {solver.WARMUP_FACTOR:g}"
        yield f"{warmup} over {spell(solver.WARMUP_ITERS)}"
    yield str(solver.LR_SCHEDULER_NAME)
    for step in _effective_steps(resolved):
        yield f"x {solver.GAMMA:g} after {spell(step)}"
    for key in ("BACKBONE_MULTIPLIER", "TOKEN_MULTIPLIER", "LAYER_DECAY"):
        if solver[key] != 1:
            yield f"{key} {solver[key]:g}"


class MovableLR(LRMultiplier):
    """Detectron2's scheduler, for a run whose end can move.

    The learning rate is a function of the share of the run that is done. When the end moves, this
    share does not jump. From there on, it rises evenly to 1 at the new end.

    Attributes:
        end: number of iterations of the run.
    """

    def __init__(self, optimizer: Optimizer, multiplier: Any, max_iter: int) -> None:
        """The arguments are those of ``LRMultiplier``."""
        self.end = max_iter
        self._planned_end = max_iter
        self._moved_at = 0  # iteration of the last move
        self._share_then = 0.0  # share of the run that was done at the last move
        super().__init__(optimizer, multiplier, max_iter)

    @property
    def share(self) -> float:
        """Share of the run that is done, from 0 to 1."""
        steps = self.last_epoch - self._moved_at
        num_steps = max(1, self.end - self._moved_at)
        return min(1.0, self._share_then + (1 - self._share_then) * steps / num_steps)

    def move_end(self, end: int) -> None:
        """Makes the run end after ``end`` iterations, of which the present one is the least."""
        self._share_then = self.share
        self._moved_at = self.last_epoch
        self.end = end

    def get_lr(self) -> list[float]:
        multiplier = self._multiplier(self.share)
        return [base_lr * multiplier for base_lr in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of ``LRMultiplier``, and where the end was moved."""
        return {
            **super().state_dict(),
            "end": self.end,
            "planned_end": self._planned_end,
            "moved_at": self._moved_at,
            "share_then": self._share_then,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict``. Moves are forgotten if the run has another length by now."""
        super().load_state_dict({key: state_dict[key] for key in ("base_lrs", "last_epoch")})
        if state_dict["planned_end"] != self._planned_end:
            return
        self.end = state_dict["end"]
        self._moved_at = state_dict["moved_at"]
        self._share_then = state_dict["share_then"]


def build_lr_scheduler(cfg: CfgNode, optimizer: Optimizer) -> MovableLR:
    """Builds Detectron2's ``SOLVER.LR_SCHEDULER_NAME`` for a result of ``resolve_schedule``.

    Steps without an effect are removed, because Detectron2 fails if one is ``SOLVER.MAX_ITER``.
    """
    pruned = with_values(cfg, {"SOLVER.STEPS": _effective_steps(cfg)})
    # Detectron2 builds the course of the learning rate together with a scheduler, which would
    # already change the learning rates of the optimizer.
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    course = detectron2_build.build_lr_scheduler(pruned, stand_in)._multiplier
    return MovableLR(optimizer, course, cfg.SOLVER.MAX_ITER)


def _effective_steps(cfg: CfgNode) -> tuple[int, ...]:
    """Returns the ``SOLVER.STEPS`` that lower the learning rate during the run.

    They are the steps before ``SOLVER.MAX_ITER``, if the scheduler reads steps.
    """
    if cfg.SOLVER.LR_SCHEDULER_NAME != "WarmupMultiStepLR":
        return ()
    return tuple(step for step in cfg.SOLVER.STEPS if step < cfg.SOLVER.MAX_ITER)

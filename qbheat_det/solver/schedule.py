# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Schedules in epochs converted to iterations, and learning rates scaled with the batch."""

import math
from fractions import Fraction

from detectron2.config import CfgNode
from detectron2.solver import build as detectron2_build
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from qbheat_det.config import at_least, check_keys, one_of
from qbheat_det.core.errors import UserError

# Learning rate relative to that of the reference batch, by the ratio of the two batches.
_LR_SCALING = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}
_EPOCHS = (
    lambda epochs: not isinstance(epochs, bool) and 0 <= epochs < math.inf,
    "a number of epochs, at least 0",
)
_BATCH_RULES = {
    "SOLVER.IMS_PER_BATCH": at_least(1),
    "SOLVER.REFERENCE_BATCH_SIZE": at_least(0),
    "SOLVER.LR_SCALING": one_of(*_LR_SCALING),
    "SOLVER.BASE_LR": (lambda rate: 0 < rate < math.inf, "a number above 0"),
}
_EPOCH_RULES = {
    "SOLVER.EPOCHS": _EPOCHS,
    "SOLVER.WARMUP_EPOCHS": _EPOCHS,
    "SOLVER.CHECKPOINT_EPOCHS": _EPOCHS,
    "TEST.EVAL_EPOCHS": _EPOCHS,
    "VIS.EPOCHS": _EPOCHS,
    "SOLVER.STEP_EPOCHS": (
        lambda steps: all(map(_EPOCHS[0], steps)) and sorted({0, *steps}) == [0, *steps],
        "numbers of epochs that rise from above 0",
    ),
}
_ITERATION_RULES = {
    "SOLVER.MAX_ITER": at_least(1),
    "SOLVER.WARMUP_ITERS": at_least(0),
    "SOLVER.WARMUP_FACTOR": at_least(0),
    "SOLVER.WARMUP_METHOD": one_of("linear", "constant"),
    "SOLVER.CHECKPOINT_PERIOD": at_least(1),
    "TEST.EVAL_PERIOD": at_least(0),
    "VIS.PERIOD": at_least(0),
}


def resolve_schedule(cfg: CfgNode, *, num_images: int) -> CfgNode:
    """Works out iterations from epochs, and the learning rate from the batch.

    An epoch is ``num_images / SOLVER.IMS_PER_BATCH`` iterations, whole or not; what happens after
    some epochs happens at the first iteration by which as many images have been seen. The rate is
    ``SOLVER.BASE_LR`` times the ratio r of the batch to ``SOLVER.REFERENCE_BATCH_SIZE``, or times
    the root of r, as ``SOLVER.LR_SCALING`` says.

    In the result the reference is the batch itself and the keys in epochs remain. So it resolves
    to itself, and another ``SOLVER.IMS_PER_BATCH`` or other data make of it what they would have
    made of ``cfg``. Epochs hold where iterations are given too.

    Args:
        cfg: config; it stays as it is.
        num_images: images in an epoch, after what ``DATALOADER`` filters.

    Returns:
        A copy, frozen if ``cfg`` is.

    Raises:
        UserError: a value of the schedule is out of range, or two contradict each other.
    """
    _check_batch(cfg, num_images)
    _check_epochs(cfg)
    resolved: CfgNode = cfg.clone()
    resolved.defrost()
    solver, test = resolved.SOLVER, resolved.TEST

    def iterations(epochs: float) -> int:
        return math.ceil(_exact(epochs) * num_images / solver.IMS_PER_BATCH)

    if solver.EPOCHS:
        solver.MAX_ITER = iterations(solver.EPOCHS)
    if solver.STEP_EPOCHS:
        solver.STEPS = tuple(iterations(epochs) for epochs in solver.STEP_EPOCHS)
    if solver.WARMUP_EPOCHS:
        solver.WARMUP_ITERS = iterations(solver.WARMUP_EPOCHS)
    if solver.CHECKPOINT_EPOCHS:
        solver.CHECKPOINT_PERIOD = iterations(solver.CHECKPOINT_EPOCHS)
    if test.EVAL_EPOCHS:
        test.EVAL_PERIOD = iterations(test.EVAL_EPOCHS)
    if resolved.VIS.EPOCHS:
        resolved.VIS.PERIOD = iterations(resolved.VIS.EPOCHS)
    if solver.REFERENCE_BATCH_SIZE:
        factor = _LR_SCALING[solver.LR_SCALING](solver.IMS_PER_BATCH / solver.REFERENCE_BATCH_SIZE)
        solver.BASE_LR *= factor
        if "BASE_LR_END" in solver:  # of a cosine; not in v0.6 of Detectron2
            solver.BASE_LR_END *= factor
        solver.REFERENCE_BATCH_SIZE = solver.IMS_PER_BATCH
    _check_iterations(resolved)
    if cfg.is_frozen():
        resolved.freeze()
    return resolved


def describe_schedule(cfg: CfgNode, resolved: CfgNode, num_images: int) -> str:
    """Says in lines what is printed when a run starts: epochs, iterations, learning rates.

    Args:
        cfg: what was given to ``resolve_schedule``.
        resolved: what it returned.
        num_images: as there.
    """
    solver, period = resolved.SOLVER, resolved.TEST.EVAL_PERIOD
    per_epoch = num_images / solver.IMS_PER_BATCH

    def spell(iterations: int) -> str:
        return f"{iterations:,} iterations ({_short(iterations / per_epoch)} epochs)"

    shape = [solver.LR_SCHEDULER_NAME]
    if solver.WARMUP_ITERS and solver.WARMUP_FACTOR != 1:
        shape.append(
            f"{solver.WARMUP_METHOD} warm-up from x {solver.WARMUP_FACTOR:g} over "
            + spell(solver.WARMUP_ITERS)
        )
    if solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR":
        shape += [f"x {solver.GAMMA:g} after {spell(step)}" for step in _steps_in_time(resolved)]
    lines = [
        f"Schedule: {spell(solver.MAX_ITER)} of {solver.IMS_PER_BATCH:,} images; an epoch of "
        f"{num_images:,} images is {_short(per_epoch)} iterations",
        _describe_rate(cfg, resolved),
        f"Its course: {', '.join(shape)}",
        f"Checkpoints every {spell(solver.CHECKPOINT_PERIOD)}, evaluation "
        + (f"every {spell(period)} and at the end" if period else "at the end"),
    ]
    return "\n".join([*lines, *_remarks(resolved)])


def build_lr_scheduler(cfg: CfgNode, optimizer: Optimizer) -> LRScheduler:
    """Builds Detectron2's ``SOLVER.LR_SCHEDULER_NAME`` for a resolved config.

    Steps from ``SOLVER.MAX_ITER`` on have no effect and are left out, as ``describe_schedule``
    says; Detectron2 alone fails on a step that is just at the end.

    Raises:
        UserError: there is no scheduler of that name, or a setting of it is out of range.
    """
    _check_iterations(cfg)
    pruned = cfg.clone()
    pruned.defrost()
    pruned.SOLVER.STEPS = _steps_in_time(cfg)
    return detectron2_build.build_lr_scheduler(pruned, optimizer)


def _describe_rate(cfg: CfgNode, resolved: CfgNode) -> str:
    base, effective = cfg.SOLVER.BASE_LR, resolved.SOLVER.BASE_LR
    reference, batch = cfg.SOLVER.REFERENCE_BATCH_SIZE, resolved.SOLVER.IMS_PER_BATCH
    line = f"Learning rate: base {base:g}, effective {effective:.6g}"
    if reference:
        line += f" (base for {reference:,} images a step, {cfg.SOLVER.LR_SCALING} in the batch)"
    else:
        line += f" at {batch:,} images a step (SOLVER.REFERENCE_BATCH_SIZE 0: not scaled)"
    if cfg.SOLVER.BACKBONE_MULTIPLIER != 1:
        line += f"; backbone x {cfg.SOLVER.BACKBONE_MULTIPLIER:g}"
    if cfg.SOLVER.LAYER_DECAY != 1:
        line += (
            f"; x {cfg.SOLVER.LAYER_DECAY:g} from the head to the backbone's last layer, and from "
            "each layer to the one before"
        )
    return line


def _short(number: float) -> str:
    return f"{number:,.2f}".rstrip("0").rstrip(".")


def _remarks(cfg: CfgNode) -> list[str]:
    """Returns a sentence for each setting in iterations that the end of the run cuts off."""
    solver, remarks = cfg.SOLVER, []
    late = [step for step in solver.STEPS if step not in _steps_in_time(cfg)]
    if late and solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR":
        remarks.append(
            f"Note: SOLVER.STEPS {', '.join(f'{step:,}' for step in late)} come after the last of "
            f"{solver.MAX_ITER:,} iterations and have no effect"
        )
    if solver.WARMUP_ITERS > solver.MAX_ITER:
        remarks.append(
            f"Note: the run ends after {solver.MAX_ITER:,} of SOLVER.WARMUP_ITERS "
            f"{solver.WARMUP_ITERS:,}: the learning rate never reaches its full height"
        )
    return remarks


def _steps_in_time(cfg: CfgNode) -> tuple[int, ...]:
    return tuple(step for step in cfg.SOLVER.STEPS if step < cfg.SOLVER.MAX_ITER)


def _exact(epochs: float) -> Fraction:
    """The decimal number that was written, so that 0.1 of 30 images are 3 images."""
    return Fraction(repr(epochs))


def _check_batch(cfg: CfgNode, num_images: int) -> None:
    if num_images < 1:
        raise UserError(f"there are {num_images} images to train on: DATASETS.TRAIN is empty")
    check_keys(cfg, _BATCH_RULES)
    if cfg.SOLVER.REFERENCE_WORLD_SIZE:
        raise UserError(
            "SOLVER.REFERENCE_WORLD_SIZE would change the batch with the number of processes: set "
            "it to 0; SOLVER.IMS_PER_BATCH is the batch of one step over all processes"
        )


def _check_epochs(cfg: CfgNode) -> None:
    check_keys(cfg, _EPOCH_RULES)
    solver = cfg.SOLVER
    if not solver.EPOCHS:
        return
    late = [step for step in solver.STEP_EPOCHS if step >= solver.EPOCHS]
    if late and solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR":
        raise UserError(
            f"SOLVER.STEP_EPOCHS {solver.STEP_EPOCHS} do not fit in SOLVER.EPOCHS "
            f"{solver.EPOCHS:g}: change one, or give SOLVER.STEP_EPOCHS '()'"
        )
    if solver.WARMUP_EPOCHS > solver.EPOCHS:
        raise UserError(
            f"SOLVER.WARMUP_EPOCHS {solver.WARMUP_EPOCHS:g} is more than SOLVER.EPOCHS "
            f"{solver.EPOCHS:g}"
        )


def _check_iterations(cfg: CfgNode) -> None:
    solver = cfg.SOLVER
    schedulers = ["WarmupMultiStepLR", "WarmupCosineLR"]
    if "NUM_DECAYS" in solver:  # Detectron2's main branch
        schedulers.append("WarmupStepWithFixedGammaLR")
    check_keys(cfg, {"SOLVER.LR_SCHEDULER_NAME": one_of(*schedulers), **_ITERATION_RULES})
    if not 0 <= solver.get("BASE_LR_END", 0.0) <= solver.BASE_LR:
        raise UserError(
            f"SOLVER.BASE_LR_END {solver.BASE_LR_END} must lie between 0 and SOLVER.BASE_LR "
            f"{solver.BASE_LR}"
        )
    steps = [0, *_steps_in_time(cfg)]
    if solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR" and sorted(set(steps)) != steps:
        raise UserError(
            f"SOLVER.STEPS must rise from above 0, not {tuple(solver.STEPS)}; with few images, "
            "steps in epochs can coincide in iterations"
        )

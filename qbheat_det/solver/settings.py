# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Valid values of ``SOLVER`` and of the other keys of a schedule, each in one line of a table."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from detectron2.config import CfgNode, get_cfg

from qbheat_det.core.errors import UserError

Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
"""By key: whether a value is valid, and what is expected, for the message."""

LR_SCALING: dict[str, Callable[[float], float]] = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}
"""Factor on the learning rate by the ratio of the batch to the reference batch."""
# The last is in Detectron2's main branch only, with the key NUM_DECAYS.
_SCHEDULERS = ["WarmupMultiStepLR", "WarmupCosineLR"]
_SCHEDULERS += ["WarmupStepWithFixedGammaLR"] if "NUM_DECAYS" in get_cfg().SOLVER else []


def _one_of(*names: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in names, f"one of {', '.join(names)}"


def _at_least(least: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value >= least, f"at least {least}"


def _is_epochs(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def _rises(values: Any) -> bool:
    return all(map(_is_epochs, values)) and sorted({0, *values}) == [0, *values]


_EPOCHS = (_is_epochs, "a number of epochs from 0 on")
EPOCH_RULES: Rules = {
    "SOLVER.IMS_PER_BATCH": _at_least(1),
    "SOLVER.REFERENCE_BATCH_SIZE": (
        lambda value: value >= 0,
        "the batch that SOLVER.BASE_LR is meant for, or 0 not to scale it",
    ),
    "SOLVER.LR_SCALING": _one_of(*LR_SCALING),
    "SOLVER.REFERENCE_WORLD_SIZE": (
        lambda value: value == 0,
        "0: give the batch of a step as SOLVER.IMS_PER_BATCH, whatever the number of processes",
    ),
    "SOLVER.BASE_LR": (lambda value: 0 < value < math.inf, "a number above 0"),
    "SOLVER.STEP_EPOCHS": (_rises, "epochs that rise from above 0"),
    "SOLVER.EPOCHS": _EPOCHS,
    "SOLVER.WARMUP_EPOCHS": _EPOCHS,
    "SOLVER.CHECKPOINT_EPOCHS": _EPOCHS,
    "TEST.EVAL_EPOCHS": _EPOCHS,
    "VIS.EPOCHS": _EPOCHS,
}
ITERATION_RULES: Rules = {
    "SOLVER.LR_SCHEDULER_NAME": _one_of(*_SCHEDULERS),
    "SOLVER.WARMUP_METHOD": _one_of("linear", "constant"),
    "SOLVER.WARMUP_FACTOR": _at_least(0),
    "SOLVER.WARMUP_ITERS": _at_least(0),
    "SOLVER.MAX_ITER": _at_least(1),
    "SOLVER.CHECKPOINT_PERIOD": _at_least(1),
    "TEST.EVAL_PERIOD": _at_least(0),
    "VIS.PERIOD": _at_least(0),
}
OPTIMIZER_RULES: Rules = {
    "SOLVER.OPTIMIZER": _one_of("SGD", "ADAMW"),
    "SOLVER.LAYER_DECAY": (lambda value: 0 < value <= 1, "a factor in (0, 1]"),
    "SOLVER.BACKBONE_MULTIPLIER": _at_least(0),
    "SOLVER.BETAS": (
        lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value),
        "two factors in [0, 1)",
    ),
}
CLIP_RULES: Rules = {
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": _one_of("value", "norm", "full_model"),
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": (lambda value: value > 0, "above 0"),
}


def check_settings(cfg: CfgNode, rules: Rules) -> None:
    """Checks the values of a config.

    Raises:
        UserError: a value is invalid; names its key.
    """
    for key, (is_valid, expected) in rules.items():
        value: Any = cfg
        for part in key.split("."):
            value = value[part]
        if not is_valid(value):
            raise UserError(f"{key} is {value!r}, expected {expected}")

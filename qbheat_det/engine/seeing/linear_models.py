# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The linear models of QB-Heat in files of weights, without the model around them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from qbheat_det.analysis.spectrum_table import Models
from qbheat_det.checkpoint import read_weights
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.pretrain import HeatPredictor, LinearModels

from .refusal import NothingToSee

_PREFIX = "predictor."
_STEPS = re.compile(r"model_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A file of weights of a run.

    Attributes:
        path: of the file.
        steps: that were done when it was written.
    """

    path: Path
    steps: int


def read_linear_models(path: Path, label: str) -> Models:
    """Returns offset and matrices, explicit and implicit ones, of each scale.

    Args:
        path: weights of a pre-training by QB-Heat.
        label: what they are called.

    Raises:
        NothingToSee: the file holds no linear models.
        UserError: the file cannot be read, or its models are not whole.
    """
    weights, _ = read_weights(str(path))
    state = {key[len(_PREFIX) :]: value for key, value in weights.items() if _is_model(key)}
    if not state:
        raise NothingToSee(
            f"no linear models of QB-Heat in '{label}': a pre-training by QB-Heat has them, and "
            "backbones, detectors and other objectives do not"
        )
    predictor = _build(state, path)
    found: dict[str, tuple[float, dict[str, Tensor]]] = {}
    for scale, module in predictor.scales.items():
        models = cast(LinearModels, module)
        found[scale] = models.offset, {name: m.detach() for name, m in models.matrices().items()}
    return found


def list_checkpoints(folder: Path, number: int) -> list[Checkpoint]:
    """Returns that many checkpoints of a run, spread evenly over its course, the last among them.

    Args:
        folder: of the run.
        number: at most so many; 0 for none.
    """
    by_file = {path.resolve(): path for path in sorted(folder.glob("model_*.pth"))}
    found = []
    for path in by_file.values():
        match = _STEPS.fullmatch(path.resolve().stem)
        if match:  # the name tells the index of the last step
            found.append(Checkpoint(path, int(match[1]) + 1))
    found.sort(key=lambda checkpoint: checkpoint.steps)
    number = min(number, len(found))
    return [found[len(found) * (index + 1) // number - 1] for index in range(number)]


def _is_model(key: str) -> bool:
    return key.startswith(f"{_PREFIX}scales.")


def _build(state: dict[str, Tensor], path: Path) -> HeatPredictor:
    kinds = {key.split(".")[1] for key in state}
    first = next(iter(state.values()))
    number = len(state) // len(kinds)
    try:
        predictor = HeatPredictor(
            dim=len(first),
            num_models=number,
            visible="both" if len(kinds) > 1 else next(iter(kinds)),
        )
        predictor.load_state_dict(state)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"'{path}' holds linear models that are not whole: {error}") from error
    return predictor

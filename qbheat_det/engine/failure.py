# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Saves a training step whose loss is not finite, in a file that ``replay_failure`` runs again."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.structures import BitMasks, Boxes, Instances, PolygonMasks, RotatedBoxes
from detectron2.utils import comm
from torch import Tensor, nn

from qbheat_det.config import dump_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.core.text import join_first

from .batch_source import BatchedInputs

_FORMAT = "qbheat_det failed step, 3"
# The classes that reading a file may construct, besides those that torch.load allows. The NumPy
# classes belong to polygons.
_STRUCTURES = [BitMasks, Boxes, Instances, PolygonMasks, RotatedBoxes]
_ALLOWED = [*_STRUCTURES, np.ndarray, np.dtype, type(np.dtype("f")), type(np.dtype("d"))]
_ALLOWED.append(np.empty(0).__reduce__()[0])


@dataclass(frozen=True)
class FailedStep:
    """The state of a step whose loss was not finite, as ``dump_failure`` writes it.

    Attributes:
        config: YAML of the resolved config.
        batches: micro-batches of this process, up to the failed one. The earlier ones are needed
            because they draw random numbers.
        weights: state dict. BatchNorm's statistics include the failed step.
        buffers: buffers that are not in ``weights``.
        scale: loss scale of mixed precision (float16).
        losses: weighted losses of the last micro-batch on this process, by name.
        normalizers: second argument of the model's ``forward``, if it takes one.
        device: device type, such as "cpu".
    """

    config: str
    iteration: int
    seed: int
    batches: list[BatchedInputs]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    rank: int = 0
    scale: float = 1.0
    losses: dict[str, float] = field(default_factory=dict)
    normalizers: Tensor | None = None
    num_processes: int = 1
    device: str = "cpu"


def report_failure(output_dir: str, *, iteration: int, rank: int, **state: Any) -> UserError:
    """Writes ``OUTPUT_DIR/failure_<iteration>_rank<rank>.pt`` and returns the error to raise.

    ``state`` holds the other arguments of ``dump_failure``, including "losses". If the file cannot
    be written, the error says so.
    """
    path = os.path.join(output_dir, f"failure_{iteration:07d}_rank{rank}.pt")
    try:
        dump_failure(path, iteration=iteration, rank=rank, **state)
        replay = f"'qbheat train --replay {path}' names the first module that fails"
    except UserError as error:
        replay = f"no file to replay it was written ({error})"
    bad = [f"{name} {value}" for name, value in state["losses"].items() if not math.isfinite(value)]
    return UserError(
        f"a loss is not finite at iteration {iteration} ({join_first(bad)}): {replay}; try a lower "
        "SOLVER.BASE_LR or SOLVER.CLIP_GRADIENTS.ENABLED True"
    )


def dump_failure(
    path: str | os.PathLike[str],
    *,
    cfg: CfgNode,
    model: nn.Module,
    batched_inputs: Sequence[BatchedInputs],
    **values: Any,
) -> None:
    """Writes a failed step atomically; ``values`` are further attributes of ``FailedStep``."""
    weights = model.state_dict()
    step = FailedStep(
        config=dump_config(cfg),
        batches=[_to_storable(batch) for batch in batched_inputs],
        weights=_to_storable(dict(weights)),
        buffers=_to_storable({k: b for k, b in model.named_buffers() if k not in weights}),
        num_processes=comm.get_world_size(),
        device=next(model.parameters()).device.type,
        **_to_storable(values),
    )
    content = {"format": _FORMAT, **vars(step)}
    write_atomically(path, lambda stream: torch.save(content, stream))


def read_failure(path: str | os.PathLike[str]) -> FailedStep:
    """Reads a file of ``dump_failure`` without running code that it may contain.

    Raises:
        UserError: the file is missing, damaged, or of another kind.
    """
    if not Path(path).is_file():
        raise UserError(f"there is no file '{path}' to replay")
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unzipping a damaged file can raise anything
        raise UserError(f"'{path}' cannot be read ({type(error).__name__})") from error
    try:
        if content.pop("format") == _FORMAT:
            return FailedStep(**content)
    except (AttributeError, KeyError, TypeError):
        pass
    raise UserError(f"'{path}' is not a failure_*.pt of this version of qbheat_det")


def _to_storable(value: Any) -> Any:
    """Copies nested data to the CPU; types that ``read_failure`` refuses become their ``repr``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _to_storable(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_to_storable(element) for element in value]
    if isinstance(value, Instances):
        fields = {name: _to_storable(field) for name, field in value.get_fields().items()}
        return Instances(tuple(map(int, value.image_size)), **fields)
    return value.to("cpu") if type(value) in _STRUCTURES else repr(value)

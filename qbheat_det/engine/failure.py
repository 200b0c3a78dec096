# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A loss that is not finite leaves one file from which the step can be run again.

The file holds tensors, numbers and strings only, so reading it runs nothing.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qbheat_det.config import dump_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

from .device_batches import BatchedInputs
from .plain_data import from_plain, to_plain

_FORMAT = "qbheat_det failed step, 1"


class NonFiniteLoss(UserError):
    """Training cannot go on: a loss is infinite or not a number."""

    def __init__(
        self, iteration: int, losses: Mapping[str, float], path: str | os.PathLike[str]
    ) -> None:
        """
        Args:
            iteration: number of the step.
            losses: by name.
            path: the file that ``dump_failure`` wrote, or a sentence that says why there is none.
        """
        bad = [f"{name} {value}" for name, value in losses.items() if not math.isfinite(value)]
        values = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        found = f"a loss is not finite at iteration {iteration} ({values or 'no loss was reached'})"
        if os.path.isfile(path):
            found += (
                f"; the batch, the config and the gradients are in '{path}': "
                f"'python tools/train_net.py --replay {path}' runs the step again and names "
                "the first module that fails"
            )
        else:
            found += f"; {path}"
        super().__init__(
            f"{found}. Usual cures: a lower SOLVER.BASE_LR or a longer warm-up, "
            "SOLVER.CLIP_GRADIENTS.ENABLED True, and SOLVER.AMP.PRECISION bfloat16 in place of "
            "float16"
        )
        self.iteration = iteration
        self.losses = dict(losses)
        self.path = str(path)


def failed_step(output_dir: str, *, iteration: int, rank: int, **state: Any) -> NonFiniteLoss:
    """Writes ``OUTPUT_DIR/failure_<iteration>_rank<rank>.pt`` and returns what is to be raised.

    A disk that is full does not hide the failure: the sentence then says that no file was written.

    Args:
        output_dir: folder of the run.
        iteration: number of the step.
        rank: of this process.
        state: the other arguments of ``dump_failure``.
    """
    path = os.path.join(output_dir, f"failure_{iteration:07d}_rank{rank}.pt")
    try:
        dump_failure(path, iteration=iteration, rank=rank, **state)
    except UserError as error:
        path = f"no file to replay it was written ({error})"
    return NonFiniteLoss(iteration, state.get("losses", {}), path)


def dump_failure(
    path: str | os.PathLike[str],
    *,
    cfg: CfgNode,
    model: nn.Module,
    batched_inputs: Sequence[BatchedInputs],
    iteration: int,
    seed: int,
    rank: int = 0,
    losses: Mapping[str, float] | None = None,
    normalizers: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Writes a step that failed, in one file that is whole or not there.

    Args:
        path: file to write.
        cfg: resolved config.
        model: with the weights from before the step; in ``.grad`` the last gradients there are.
        batched_inputs: micro-batches of this process from the first to the one that failed. The
            earlier ones are needed because they draw random numbers.
        iteration: number of the step.
        seed: of the run, as in ``seed_step``.
        rank: of this process.
        losses: of the last micro-batch on this process, by name, as they entered the sum.
        normalizers: what the model's ``forward`` was given beside the batch, if anything.
        scale: factor on the loss before the backward pass (fp16).

    Raises:
        UserError: the file cannot be written.
    """
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    weights = bare.state_dict()
    content = {
        "format": _FORMAT,
        "config": dump_config(cfg),
        "iteration": int(iteration),
        "seed": int(seed),
        "rank": int(rank),
        "num_processes": comm.get_world_size(),
        "device": next((p.device.type for p in bare.parameters()), "cpu"),
        "scale": float(scale),
        "losses": {name: float(value) for name, value in (losses or {}).items()},
        "normalizers": to_plain(normalizers),
        "batches": [to_plain(batch) for batch in batched_inputs],
        "weights": to_plain(weights),
        "buffers": to_plain({k: v for k, v in bare.named_buffers() if k not in weights}),
        "gradients": {name: to_plain(p.grad) for name, p in bare.named_parameters()},
    }
    write_atomically(path, lambda stream: torch.save(content, stream))


@dataclass(frozen=True)
class FailedStep:
    """What ``dump_failure`` wrote; the attributes are its arguments, ``config`` is YAML.

    ``buffers`` are those that are not part of ``weights``; ``gradients`` are None where there
    were none.
    """

    config: str
    iteration: int
    seed: int
    rank: int
    num_processes: int
    device: str
    scale: float
    losses: dict[str, float]
    normalizers: Tensor | None
    batches: list[BatchedInputs]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def read_failure(path: str | os.PathLike[str]) -> FailedStep:
    """Reads what ``dump_failure`` wrote, as tensors only.

    Raises:
        UserError: the file is missing, broken, or something else.
    """
    if not Path(path).is_file():
        raise UserError(f"there is no file '{path}' to replay")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file can raise anything on its way through zip
        raise UserError(
            f"'{path}' cannot be read: it is truncated, or no failure_*.pt at all "
            f"({type(error).__name__})"
        ) from error
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise UserError(
            f"'{path}' is no failed step: --replay takes the failure_*.pt that training leaves "
            "in OUTPUT_DIR"
        )
    try:
        return FailedStep(**{**content, "batches": from_plain(content["batches"])})
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"'{path}' does not hold what a failed step does: {error}") from error

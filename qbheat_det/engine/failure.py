# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds the module that makes a loss infinite or nan, by running the step forward once more."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from detectron2.layers import FrozenBatchNorm2d
from detectron2.structures import Boxes, ImageList, Instances
from detectron2.utils import comm
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first, one_line
from qbheat_det.layers import NormedConv2d

from .batch_source import BatchedInputs


def explain_failure(
    model: nn.Module,
    losses: Mapping[str, float],
    batches: Sequence[BatchedInputs],
    run: Callable[[BatchedInputs], object],
    *,
    iteration: int,
) -> UserError:
    """Runs the micro-batches of a failed step again and returns the error to raise.

    Every process must call it, because a model may communicate in its forward pass.

    Args:
        model: the model before the step, without a distributed wrapper.
        losses: of this process's last micro-batch, by name.
        batches: micro-batches of this process, up to the failed one; earlier ones draw random
            numbers too.
        run: the forward pass of one micro-batch, with the random state of the step.
        iteration: of the failed step.
    """
    first = BadOutput()
    try:
        with _watched(model, first):
            for batch in batches:
                run(batch)
        cause = str(first)
    except Exception as error:  # must not hide the failure itself
        cause = f"running the step again raised {type(error).__name__}: {one_line(error)}"
    bad = [f"{name} {value}" for name, value in losses.items() if not math.isfinite(value)]
    names = [str(entry["file_name"]) for entry in batches[-1] if "file_name" in entry]
    images = f"; images: {join_first(names, limit=8)}" if names else ""
    own = f"{join_first(bad)} on process {comm.get_rank()}): {cause}{images}" if bad else ""
    messages = [message for message in comm.all_gather(own) if message]
    return UserError(
        f"a loss is not finite at iteration {iteration} ({messages[0]}; try a lower "
        "SOLVER.BASE_LR or SOLVER.CLIP_GRADIENTS.ENABLED True"
    )


@dataclasses.dataclass
class BadOutput:
    """The first module that returned a value that is not finite, which ``str`` describes.

    Attributes:
        module: name and class; empty if all outputs are finite.
        values: number of such values in its output, and whether its inputs and weights are finite.
    """

    module: str = ""
    values: str = ""

    def __str__(self) -> str:
        if not self.module:
            return "the outputs of all modules are finite"
        return f"the first such output is that of {self.module}, {self.values}"


@contextlib.contextmanager
def _watched(model: nn.Module, first: BadOutput) -> Iterator[None]:
    """Fills ``first`` while the model runs; children come before their parents."""
    handles: list[RemovableHandle] = []

    def watch(name: str, module: nn.Module) -> None:
        def check(_: nn.Module, inputs: Any, output: Any) -> None:
            if first.module or not (bad := _count_bad(output)):
                return
            first.module = f"{name or 'the model itself'} ({type(module).__name__})"
            states = {"inputs": _count_bad(inputs), "weights": _count_bad([*module.parameters()])}
            said = [f"{key} {'not ' if count else ''}finite" for key, count in states.items()]
            first.values = f"{bad:,} values, {', '.join(said)}"

        handles.append(module.register_forward_hook(check))

    # A hook on a frozen norm would prevent its folding into the convolution, unlike in training.
    folded = {
        module.norm
        for module in model.modules()
        if isinstance(module, NormedConv2d) and isinstance(module.norm, FrozenBatchNorm2d)
    }
    for name, module in model.named_modules():
        if module not in folded:
            watch(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _count_bad(value: Any) -> int:
    """Returns how many floating-point values in nested data are not finite."""
    if isinstance(value, Tensor):
        return int((~torch.isfinite(value.detach())).sum())
    if isinstance(value, Instances | ImageList | Boxes) or dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(map(_count_bad, value)) if isinstance(value, list | tuple) else 0

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds the module that makes a loss infinite or NaN, by repeating the forward pass of the step."""

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

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first, one_line
from qbheat_det.layers import NormedConv2d
from qbheat_det.modeling.contracts import BatchedInputs


def explain_failure(
    model: nn.Module,
    losses: Mapping[str, float],
    batches: Sequence[BatchedInputs],
    run: Callable[[BatchedInputs], object],
    *,
    iteration: int,
) -> UserError:
    """Runs the micro-batches of a failed step again and returns the error to raise.

    Every process must call this function, because a forward pass may communicate.

    Args:
        model: the model before the step, without a distributed wrapper.
        losses: losses of this process's last micro-batch, by name.
        batches: micro-batches of this process up to the failed one. The earlier ones are needed
            because they draw random numbers too.
        run: the forward pass of one micro-batch; the caller has seeded the step.
        iteration: iteration of the failed step.
    """
    try:
        with _watched(model) as found:
            for batch in batches:
                run(batch)
        cause = found[0] if found else "the outputs of all modules are finite"
    except Exception as error:  # must not hide the original failure
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


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """Yields a list that describes each module with non-finite outputs, children before parents."""
    found: list[str] = []

    def watch(name: str, module: nn.Module) -> Callable[..., None]:
        def check(_: nn.Module, inputs: Any, output: Any) -> None:
            if bad := _count_bad(output):
                states = {"inputs": inputs, "weights": [*module.parameters()]}
                said = [f"{k} {'not ' if _count_bad(v) else ''}finite" for k, v in states.items()]
                found.append(
                    f"the first such output is that of {name or 'the model itself'} "
                    f"({type(module).__name__}), {bad:,} values, {', '.join(said)}"
                )

        return check

    # A frozen norm with a hook is not folded into its convolution, unlike in training.
    folded = {
        module.norm
        for module in model.modules()
        if isinstance(module, NormedConv2d) and isinstance(module.norm, FrozenBatchNorm2d)
    }
    handles = [
        module.register_forward_hook(watch(name, module))
        for name, module in model.named_modules()
        if module not in folded
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _count_bad(value: Any) -> int:
    """Returns the number of non-finite values in the tensors of nested data."""
    if isinstance(value, Tensor):
        return int((~torch.isfinite(value.detach())).sum())
    if isinstance(value, Instances | ImageList | Boxes) or dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(map(_count_bad, value)) if isinstance(value, list | tuple) else 0

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The parts of a detector or classifier that are worth compiling, and what they are called with."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from detectron2.modeling import Backbone
from torch import nn

from qbheat_det.errors import UserError

from .compiled_part import strip_defaults
from .program import Arguments

_PARTS = ("backbone", "decoder", "head", "proposal_generator.rpn_head")
SAMPLE_SIZE, OTHER_SIZE = (800, 1088), (352, 480)
"""Rows and columns of the image that programs are made with, and of one to compare on."""


def find_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the parts of maps and tokens by name; what is around them makes boxes of them.

    Raises:
        UserError: the model is neither a backbone nor has one.
    """
    if isinstance(model, Backbone):
        return {"backbone": model}
    found = {}
    for path in _PARTS:
        with contextlib.suppress(AttributeError):
            found[path] = model.get_submodule(path)
    if "backbone" not in found:
        raise UserError(
            f"{type(model).__name__} has no backbone: deploy takes detectors, classifiers and "
            "backbones"
        )
    return found


def image_side(model: nn.Module) -> int | None:
    """Returns the side of a classifier's images, which all have one size; else None."""
    side = getattr(model, "image_size", None)
    return side if isinstance(side, int) else None


def sample_size(model: nn.Module, size: Sequence[int]) -> tuple[int, int]:
    """Returns rows and columns of an image of about ``size`` that the model takes unpadded."""
    side = image_side(model)
    if side is not None:
        return side, side
    step = size_step(model)
    height, width = (-(-length // step) * step for length in size)
    return height, width


def size_step(model: nn.Module) -> int:
    """Returns what the sides of the backbone's images are multiples of."""
    backbone = find_parts(model)["backbone"]
    step = getattr(backbone, "size_divisibility", 0)
    return int(step) or 1


@torch.no_grad()
def capture(
    model: nn.Module, parts: dict[str, nn.Module], size: Sequence[int]
) -> dict[str, Arguments]:
    """Runs a model on one image and returns what each part was called with.

    Args:
        model: in evaluation mode.
        parts: by name.
        size: rows and columns of the image.

    Returns:
        Positional arguments by name, of the parts that were called exactly once, without keywords.
    """
    calls: dict[str, list[tuple[Arguments, dict[str, Any]]]] = {name: [] for name in parts}
    with contextlib.ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(_listening(part, calls[name]))
        call(model, size)
    return {
        name: strip_defaults(found[0][0])
        for name, found in calls.items()
        if len(found) == 1 and not found[0][1]
    }


@contextlib.contextmanager
def _listening(part: nn.Module, calls: list[tuple[Arguments, dict[str, Any]]]) -> Iterator[None]:
    def listen(_: nn.Module, arguments: Arguments, keywords: dict[str, Any]) -> None:
        calls.append((arguments, keywords))

    handle = part.register_forward_pre_hook(listen, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def call(model: nn.Module, size: Sequence[int]) -> Any:
    """Runs a model on one image of noise, the same each time."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, Backbone):
        # Channels of the first convolution, of which a backbone does not tell.
        first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
        image = torch.randn(1, first.in_channels, *size, generator=generator)
        return model(image.to(device).contiguous(memory_format=torch.channels_last))
    channels = len(model.pixel_mean)  # type: ignore[arg-type]
    pixels = torch.randint(256, (channels, *size), generator=generator, dtype=torch.uint8)
    return model([{"image": pixels, "height": size[0], "width": size[1]}])

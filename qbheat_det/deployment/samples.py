# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The parts of a detector or classifier that are worth compiling, and images to call it with."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.modeling import Backbone
from torch import nn

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import FixedSizeModel

_PARTS = ("backbone", "decoder", "head", "proposal_generator.rpn_head")


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


def input_size(model: nn.Module, size: Sequence[int]) -> tuple[int, int]:
    """Returns rows and columns of what a model takes for images of ``size``.

    A classifier has one size; a backbone alone takes what a detector's padding would make.
    """
    if isinstance(model, FixedSizeModel):
        return model.image_size, model.image_size
    step = model.size_divisibility or 1 if isinstance(model, Backbone) else 1
    height, width = (-(-length // step) * step for length in size)
    return height, width


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

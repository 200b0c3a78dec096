# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a deployed part computes in place of its own ``forward``, and how that comes back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .program import InPrecision

_OWN = "_forward_before_deploy"  # by its beginning, no attribute that a program's key is made of


def replace_forward(part: nn.Module, forward: Callable[..., Any]) -> None:
    """Sets what a part computes, and remembers its own for ``restore_forwards``."""
    own = {name: part.__dict__[name] for name in ("forward",) if name in part.__dict__}
    part.__dict__.setdefault(_OWN, own)
    part.forward = forward


def restore_forwards(model: nn.Module) -> None:
    """Has the parts of a deployed model, or of a part of one, compute as they are written."""
    for module in model.modules():
        if _OWN in module.__dict__:
            module.__dict__.pop("forward", None)
            module.__dict__.update(module.__dict__.pop(_OWN))


def autocast_all(parts: dict[str, nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """Has parts compute in bfloat16 without being compiled; in float32 leaves them alone.

    Args:
        parts: by name.
        dtype: float32 or bfloat16.
        device: of the parts.
    """
    if dtype == torch.float32:
        return
    for part in parts.values():
        replace_forward(part, InPrecision(_Shell(part.forward), dtype, device).forward)


class _Shell(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)

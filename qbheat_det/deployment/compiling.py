# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compiling the backbone and the heads of a deployed model."""

import contextlib
from collections.abc import Callable, Collection

import torch
from detectron2.modeling import Backbone
from torch import nn

from qbheat_det.core.errors import UserError

from .programs import PartPrograms

_PARTS = ("backbone", "decoder", "head", "proposal_generator.rpn_head")


def find_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns by name the parts that take most of the time: the backbone, and heads on its maps.

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


def compile_for_cpu(
    parts: Collection[nn.Module], dtype: torch.dtype, run: Callable[[], None]
) -> None:
    """Compiles each part for the shapes that it is called with in ``run``; others run uncompiled.

    Args:
        parts: in evaluation mode. Changed in place.
        dtype: of their arithmetic.
        run: calls them.
    """
    programs = [PartPrograms(part, dtype) for part in parts]
    for part, each in zip(parts, programs, strict=True):
        part._compiled_call_impl = each
        each.is_compiling = True
    run()
    for each in programs:
        each.is_compiling = False


def compile_for_cuda(
    parts: Collection[nn.Module], *, dynamic: bool, cuda_graphs: bool, run: Callable[[], None]
) -> None:
    """Has ``torch.compile`` compile each part when ``run`` calls it.

    Args:
        parts: in evaluation mode. Changed in place.
        dynamic: whether the code serves images of all sizes, rather than one.
        cuda_graphs: whether one launch runs a whole part.
        run: calls them.
    """
    for part in parts:
        part.compile(dynamic=dynamic, mode="reduce-overhead" if cuda_graphs else None)
    run()


def restore_parts(parts: Collection[nn.Module]) -> None:
    """Undoes either, for which PyTorch has no public function."""
    for part in parts:
        part._compiled_call_impl = None

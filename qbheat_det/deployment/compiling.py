# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``torch.compile`` for the backbone and the heads of a deployed model."""

import contextlib
import os
from collections.abc import Iterable

import torch
from detectron2.modeling import Backbone
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config

from qbheat_det.core.errors import UserError

_PARTS = ("backbone", "decoder", "head", "proposal_generator.rpn_head")
_MIN_GRAPHS = 64  # image sizes that one part may be compiled for; PyTorch's own limit is 8


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


def find_compiler_error(device: torch.device) -> str:
    """Compiles one line and returns the first line of the error; "" if it works."""
    try:
        with torch.inference_mode(False):
            torch.compile(_one_line)(torch.ones(64, device=device))
    except Exception as error:  # of the compiler, of PyTorch, of Triton, each with its own type
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


def _one_line(x: Tensor) -> Tensor:
    return (2 * x).relu()


def compile_parts(parts: Iterable[nn.Module], *, dynamic: bool, cuda_graphs: bool) -> None:
    """Has each part compile at its next call; PyTorch keeps the result on disk for later processes.

    Args:
        parts: in evaluation mode, on one device. Changed in place.
        dynamic: whether the code serves images of all sizes, rather than one.
        cuda_graphs: whether one launch runs a whole part.
    """
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, _MIN_GRAPHS)
    for part in parts:
        if cuda_graphs:
            part.compile(dynamic=dynamic, mode="reduce-overhead")
            continue
        part.compile(
            dynamic=dynamic,
            options={
                "freezing": True,  # weights in the layout that each product wants
                # As many threads as the process has when the code runs.
                "cpp.dynamic_threads": True,
                "cpp.threads": max(2, os.cpu_count() or 1),
            },
        )


def restore_parts(parts: Iterable[nn.Module]) -> None:
    """Undoes ``compile_parts``, for which PyTorch has no public function."""
    for part in parts:
        part._compiled_call_impl = None

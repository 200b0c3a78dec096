# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A part of a model as machine code for inputs of one shape: torch.export, then AOTInductor."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from qbheat_det.core.environment import quiet
from qbheat_det.core.errors import UserError

Arguments = tuple[Any, ...]
Run = Callable[..., Any]


def lay_out(arguments: Any) -> Any:
    """Brings maps into channels-last order, which programs are made for and do not check."""
    leaves, structure = tree_flatten(arguments)
    ordered = [
        x
        if not isinstance(x, Tensor)
        else x.contiguous(memory_format=torch.channels_last)
        if x.dim() == 4
        else x.contiguous()
        for x in leaves
    ]
    return tree_unflatten(ordered, structure)


class InPrecision(nn.Module):
    """A part computed in bfloat16 where PyTorch's autocast says so.

    What it returns in half precision comes out in float32; integers and masks stay what they are.
    In float32 it is the part, with the same signature for all parts.
    """

    def __init__(self, part: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.part = part
        self.dtype, self.device_type = dtype, device.type

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As the part's own."""
        if self.dtype == torch.float32:
            return self.part(*arguments, **keywords)
        with torch.autocast(self.device_type, dtype=self.dtype):
            found = self.part(*arguments, **keywords)
        return tree_map(_widen, found)


def _widen(x: Any) -> Any:
    is_half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if is_half else x


def require_compiler() -> None:
    """Raises a UserError where there is no C++ compiler."""
    from torch._inductor import config

    wanted = [name for name in config.cpp.cxx if name]
    if not any(shutil.which(name) for name in wanted):
        raise UserError(
            f"there is no C++ compiler ({' or '.join(wanted)}): install one (on Debian: apt "
            "install g++), or name yours in $CXX"
        )


def open_program(path: Path) -> Run:
    """Returns a program as a function of what its part takes, for one image."""
    from torch._inductor import aoti_load_package

    with quiet("torch"):
        program = aoti_load_package(str(path))
    return lambda *arguments: program(*lay_out(arguments))


def build_program(part: InPrecision, arguments: Arguments, path: Path) -> None:
    """Compiles a part for the shapes of its arguments and writes the program to ``path``.

    Args:
        part: in evaluation mode, with its weights.
        arguments: of one image, as ``lay_out`` returns them.
        path: of the package.

    Raises:
        Exception: of any kind, where PyTorch cannot export or compile the part.
    """
    from torch._inductor import aoti_compile_and_package, config

    settings = {
        "freezing": True,  # weights in the layout that each product wants
        # As many threads as the process has when the program runs.
        "cpp.dynamic_threads": True,
        "cpp.threads": max(2, os.cpu_count() or 1),
    }
    # PyTorch keeps these in the folder of temporary files wherever its cache lies, under a name
    # that another user can take first: what he puts there would become part of the program.
    if hasattr(config.aot_inductor, "precompile_headers"):  # not in torch 2.6
        settings["aot_inductor.precompile_headers"] = False
    with quiet("torch"), torch.no_grad():
        exported = torch.export.export(part, arguments, strict=False)
        aoti_compile_and_package(exported, package_path=str(path), inductor_configs=settings)

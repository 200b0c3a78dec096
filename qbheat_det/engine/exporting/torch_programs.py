# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Opening TorchScript and torch.export files, which are programs: those of people you trust.

What a stranger's file could have run while it is opened, before a word of it is read, is refused as
far as PyTorch lets one: pickles that hold more than tensors, and compiled libraries. Expressions
and names of functions in a ``.pt2`` are still PyTorch's to evaluate.
"""

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from qbheat_det.core.environment import quiet

from .export_info import METADATA_FILE

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def open_program(path: Path) -> tuple[Callable[..., Any], str]:
    """Opens a file for the CPU.

    Args:
        path: ``.pt2`` for torch.export, TorchScript otherwise.

    Returns:
        From images to a tuple of outputs; and the description in the file, empty if none.

    Raises:
        Exception: of any kind, from a file that is damaged or holds what is refused.
    """
    # Registers torchvision's operators, which the program may call by name.
    import torchvision  # noqa: F401

    extra: dict[str, Any] = {METADATA_FILE: ""}
    program: Callable[..., Any]
    if path.suffix.lower() == ".pt2":
        _refuse_libraries(path)
        with _without_pickles(), quiet("torch.export", "torch._export"):
            program = torch.export.load(str(path), extra_files=extra).module()
    else:
        program = torch.jit.load(str(path), "cpu", _extra_files=extra)
    text = extra[METADATA_FILE]
    return program, text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


@contextlib.contextmanager
def _without_pickles() -> Iterator[None]:
    """Has every ``torch.load`` read tensors alone, whatever its caller asks for."""
    # torch.export.load tries tensors alone first, and then, without asking, anything.
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = before


def _refuse_libraries(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if "aotinductor" in name.lower():
                raise ValueError(f"it holds compiled code ({name}), which is not opened here")

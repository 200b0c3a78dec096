# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writing and opening files of torch.export, which are programs: open only files you trust.

Opening refuses what could run code before the file is even looked at, as far as PyTorch allows:
pickles that hold more than tensors, and compiled libraries. PyTorch still evaluates expressions
and looks up functions that a ``.pt2`` names.
"""

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from qbheat_det.core.environment import quiet

from .metadata import METADATA_FILE

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def write_torch_export(program: ExportedProgram, path: Path, metadata: str) -> None:
    """Writes a program with its ``ExportInfo`` as JSON."""
    with quiet("torch.export", "torch._export"):
        torch.export.save(program, path, extra_files={METADATA_FILE: metadata})


def open_torch_export(path: Path) -> tuple[Callable[..., Any], str]:
    """Opens a file for the CPU; also returns the metadata in it, empty if there is none.

    Raises:
        Exception: of any kind, if the file is damaged or holds what is refused.
    """
    # Registers torchvision's operators, which the program may call by name.
    import torchvision  # noqa: F401

    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if "aotinductor" in name.lower():
                raise ValueError(f"it holds compiled code ({name})")
    extra: dict[str, Any] = {METADATA_FILE: ""}
    with _without_pickles(), quiet("torch.export", "torch._export"):
        program = torch.export.load(str(path), extra_files=extra).module()
    text = extra[METADATA_FILE]
    return program, text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


@contextlib.contextmanager
def _without_pickles() -> Iterator[None]:
    """Lets every ``torch.load`` read only tensors, whatever its caller asks for."""
    # torch.export.load tries weights_only first, and on failure anything, without asking.
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = before

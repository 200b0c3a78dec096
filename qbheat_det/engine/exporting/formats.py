# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writing a module as ONNX, TorchScript or a torch.export program, batch and size left open."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

from .export_info import METADATA_FILE, METADATA_KEY

Format = Literal["onnx", "torchscript", "torch-export"]
SUFFIXES: dict[str, tuple[str, ...]] = {
    "onnx": (".onnx",),
    "torchscript": (".ts", ".torchscript"),
    "torch-export": (".pt2",),
}
"""Endings of each format's files, the usual one first."""
_OPSET = 18  # the first whose Resize is antialiased
_BATCH = torch.export.Dim("batch", min=1)
Translations = dict[Callable[..., Any], Callable[..., Any]]


def write_torchscript(module: nn.Module, images: Tensor, path: Path, metadata: str) -> None:
    """Traces a module, and writes it with its description.

    Args:
        module: in evaluation mode, from one tensor to a tuple of tensors.
        images: an example, (N, H, W, 3), with N of 2 or more.
        path: of the file.
        metadata: JSON, see ``ExportInfo``.
    """
    with torch.no_grad(), warnings.catch_warnings():
        # That tracing fixes what Python reads of a tensor: other sizes are tried after it.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, (images,), check_trace=False, strict=False)
        content = traced.save_to_buffer({METADATA_FILE: metadata})
    write_atomically(path, lambda stream: stream.write(content))


def capture(module: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    """Returns a module as a program of torch.export; see ``write_torchscript``."""
    open_sizes = {0: _BATCH, 1: torch.export.Dim("height"), 2: torch.export.Dim("width")}
    with torch.no_grad():
        return torch.export.export(
            module, (images.contiguous(),), dynamic_shapes=(open_sizes,), strict=False
        )


def write_torch_export(module: nn.Module, images: Tensor, path: Path, metadata: str) -> None:
    """As ``write_torchscript``, as a program of torch.export."""
    program = capture(module, images)
    write_atomically(
        path,
        lambda stream: torch.export.save(program, stream, extra_files={METADATA_FILE: metadata}),
    )


def write_onnx(
    module: nn.Module,
    images: Tensor,
    path: Path,
    metadata: str,
    *,
    outputs: Sequence[str],
    translations: Translations,
) -> None:
    """As ``write_torchscript``, as ONNX, all in one file.

    Args:
        outputs: names of the outputs, in their order.
        translations: how operators are spelt that the exporter does not know.

    Raises:
        UserError: a package of the extra ``export`` is missing.
    """
    inputs = ["images"]
    described = {METADATA_KEY: metadata}
    write_onnx_program(
        capture(module, images), path, described, inputs, outputs, translations=translations
    )


def write_onnx_program(
    program: torch.export.ExportedProgram,
    path: Path,
    metadata: Mapping[str, str],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    translations: Translations,
) -> None:
    """Writes a program of torch.export as ONNX.

    Args:
        program: see ``capture``.
        path: of the file.
        metadata: entries of ``metadata_props``.
        inputs: names of the inputs, in their order.
        outputs: names of the outputs, in their order.
        translations: how operators are spelt that the exporter does not know.

    Raises:
        UserError: a package of the extra ``export`` is missing.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"ONNX needs {error.name}, which is not installed: pip install 'qbheat_det[export]'"
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = torch.onnx.export(
            program,
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=_OPSET,
            custom_translation_table=translations,
            verbose=False,
        )
    assert written is not None
    written.model.metadata_props.update(metadata)
    content = written.model_proto.SerializeToString()
    write_atomically(path, lambda stream: stream.write(content))

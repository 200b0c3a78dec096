# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained weights as a file for another runtime, kept only if it gives what PyTorch gives."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from torch import Tensor

from qbheat_det.core.environment import quiet
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically
from qbheat_det.engine.media import Image, UnreadableMedia, find_media, read_bgr
from qbheat_det.engine.predict import build_predictor
from qbheat_det.engine.seeing.refusal import NothingToSee
from qbheat_det.engine.seeing.run_sets import find_run_set

from .agreement import Agreement, build_reference, measure_agreement, table_of
from .deployable import DeployableModel, build_deployable
from .exported_model import ExportedModel
from .formats import SUFFIXES, Translations, write_onnx, write_torch_export, write_torchscript
from .suppression import suppress, suppress_in_onnx

TOLERANCE = {"detection": 1e-4, "classification": 1e-4, "features": 1e-4}
"""Default largest difference by task."""
_TOY_SET = "qbheat_toy_val"
_NUM_IMAGES = 8


@dataclass
class ExportReport:
    """What came of an export: the file, and how far it is from PyTorch at each batch size."""

    path: Path
    agreement: list[Agreement]
    task: str
    tolerance: float
    source: str
    """Where the images came from."""

    def __str__(self) -> str:
        bound = f"scores to {self.tolerance:g}"
        if self.task == "detection":
            bound += f" and boxes to {self.tolerance:g} of the image's longer side"
        table = table_of(self.agreement, self.task, self.tolerance)
        return f"{table}\nagrees with PyTorch, {bound}, on {self.source}"


def export_model(
    cfg: CfgNode,
    output: Path,
    *,
    format: str,
    images: Sequence[str] = (),
    tolerance: float | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Writes a model with its weights to a file, and compares the two.

    Args:
        cfg: as of ``load_run_config``.
        output: ``.onnx``, ``.ts``, ``.torchscript`` or ``.pt2``, as the format has it.
        format: "onnx", "torchscript" or "torch-export".
        images: files and folders to compare on; the config's test set if none, the toy set where
            that is not here.
        tolerance: see ``Agreement.holds``; ``TOLERANCE`` if None.
        overwrite: whether ``output`` may exist.

    Raises:
        UserError: the model or the weights cannot be exported, or the file does not agree with
            PyTorch; there is then no file.
    """
    _check_output(output, format, overwrite=overwrite)
    cfg = on_cpu(cfg)
    pictures, source = read_images(cfg, images)
    predictor = build_predictor(cfg)
    is_onnx = format == "onnx"
    operator, translations = suppress_in_onnx() if is_onnx else (suppress, {})
    deployable = build_deployable(predictor.model, cfg, suppress=operator)
    task = deployable.info.task
    allowed = TOLERANCE[task] if tolerance is None else tolerance
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / f"model{output.suffix}"
        write_model(deployable, written, format, translations, tolerance=allowed)
        rows = measure_agreement(
            ExportedModel.open(written, device="cpu"),
            build_reference(predictor, cfg, task),
            pictures,
            tolerance=allowed,
        )
        if not all(row.holds(allowed) for row in rows):
            raise UserError(
                f"'{output}' is not written: what it gives on {source} is not what PyTorch gives "
                f"to {allowed:g} (--tolerance)\n{table_of(rows, task, allowed)}"
            )
        content = written.read_bytes()
        write_atomically(output, lambda stream: stream.write(content))
    return ExportReport(output, rows, task, allowed, source)


def write_model(
    deployable: DeployableModel,
    path: Path,
    format: str,
    translations: Translations,
    *,
    tolerance: float = 0.0,
) -> None:
    """Writes a module as the format has it, its description inside.

    Args:
        deployable: the module.
        path: of the file.
        format: "onnx", "torchscript" or "torch-export".
        translations: see ``write_onnx``.
        tolerance: noted in the description.

    Raises:
        UserError: a package is missing, or the file cannot be written.
    """
    info = dataclasses.replace(deployable.info, tolerance=tolerance)
    arguments: Any = (deployable, example_images(), path, info.to_json())
    with quiet_exporters():
        if format == "onnx":
            write_onnx(*arguments, outputs=info.outputs, translations=translations)
        elif format == "torchscript":
            write_torchscript(*arguments)
        else:
            write_torch_export(*arguments)


def example_images() -> Tensor:
    """Returns images to follow through a module: (2, 253, 311, 3), uint8."""
    # Of a size that no other number in a network is likely to have.
    values = torch.arange(2 * 253 * 311 * 3, dtype=torch.int64).view(2, 253, 311, 3) * 37 % 256
    return values.to(torch.uint8)


def read_images(cfg: CfgNode, named: Sequence[str]) -> tuple[list[Image], str]:
    """Reads a few images, in the config's pixel format.

    Args:
        cfg: of the model.
        named: files and folders; the config's test set if none, the toy set where that is not here.

    Returns:
        Images (H, W, 3), and where they come from.

    Raises:
        UserError: there is none that can be read.
    """
    if named:
        paths = [file.path for file in find_media(named) if not file.is_video]
        source = ", ".join(named)
    else:
        try:
            source = find_run_set(cfg, Path(cfg.MODEL.WEIGHTS).parent, "test")
        except NothingToSee:
            source = _TOY_SET
        paths = [Path(record["file_name"]) for record in DatasetCatalog.get(source)]
    read: list[Image] = []
    for path in paths[:: max(1, len(paths) // _NUM_IMAGES)]:
        with contextlib.suppress(UnreadableMedia):
            read.append(read_bgr(path))
        if len(read) == _NUM_IMAGES:
            break
    if not read:
        raise UserError(f"no image of {source} can be read: name others with --images")
    if cfg.INPUT.FORMAT == "RGB":
        read = [np.ascontiguousarray(image[:, :, ::-1]) for image in read]
    return read, f"{len(read)} images of {source}"


def _check_output(output: Path, format: str, *, overwrite: bool) -> None:
    if format not in SUFFIXES:
        raise UserError(f"--format is one of {', '.join(SUFFIXES)}, not '{format}'")
    if output.suffix.lower() not in SUFFIXES[format]:
        raise UserError(
            f"--output '{output}' must end in {' or '.join(SUFFIXES[format])}, by which its format "
            "is known again"
        )
    if output.exists() and not overwrite:
        raise UserError(f"'{output}' exists: choose another name, or say --overwrite")
    check_writable(output)


def on_cpu(cfg: CfgNode) -> CfgNode:
    """Graphs hold the device that they were made on; the CPU's run everywhere."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    return cfg


def quiet_exporters() -> contextlib.AbstractContextManager[None]:
    """Keeps the exporter's notes on its own doings away; its errors are raised as ever."""
    return quiet("onnxscript", "onnx_ir", "torch.onnx")

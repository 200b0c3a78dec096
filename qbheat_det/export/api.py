# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Exports a model with its weights to one file, kept only if it gives the results of PyTorch."""

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from torch import nn

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically
from qbheat_det.engine.media import UnreadableMedia, find_media, read_bgr
from qbheat_det.engine.predict import build_predictor
from qbheat_det.engine.run_record import RUN_FILE, read_run_record, register_source

from .agreement import ExportReport, build_reference, measure_agreement
from .graph import build_exportable, trace_images
from .metadata import METADATA_KEY
from .onnx import suppress_operator, write_onnx
from .runtime import EXPORTED_SUFFIXES, ExportedModel, Images
from .torch_export import write_torch_export

TOLERANCE = 1e-4
_TOY_SET = "qbheat_toy_val"
_NUM_IMAGES = 8


def export_model(
    cfg: CfgNode,
    output: Path,
    *,
    images: Sequence[str] = (),
    tolerance: float = TOLERANCE,
    overwrite: bool = False,
) -> ExportReport:
    """Writes a model with its weights to a file, and compares the two.

    Args:
        cfg: of the weights, see ``load_run_config``.
        output: ``.onnx``, or ``.pt2`` for torch.export.
        images: files and folders to compare on; by default the config's test set or the toy set.
        tolerance: see ``Agreement.holds``.
        overwrite: whether ``output`` may exist.

    Raises:
        UserError: the model or the weights cannot be exported, or the file does not agree with
            PyTorch; nothing is written then.
    """
    if output.suffix.lower() not in EXPORTED_SUFFIXES:
        raise UserError(f"--output '{output}' must end in {' or '.join(EXPORTED_SUFFIXES)}")
    if output.exists() and not overwrite:
        raise UserError(f"'{output}' exists: choose another name, or pass --overwrite")
    check_writable(output)
    cfg = on_cpu(cfg)
    examples, source = read_images(cfg, images)
    predictor = build_predictor(cfg)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / f"model{output.suffix}"
        write_model(predictor.model, cfg, written)
        exported = ExportedModel.open(written, device="cpu")
        reference = build_reference(predictor, cfg, exported.info.task)
        report = measure_agreement(
            exported, reference, examples, tolerance=tolerance, source=source
        )
        report.check()
        content = written.read_bytes()
        write_atomically(output, lambda stream: stream.write(content))
    return report


def write_model(model: nn.Module, cfg: CfgNode, path: Path) -> None:
    """Writes a model as ``.onnx``, or ``.pt2`` for torch.export, without a comparison."""
    if path.suffix.lower() == ".pt2":
        exportable = build_exportable(model, cfg)
        write_torch_export(trace_images(exportable), path, exportable.info.to_json())
        return
    exportable = build_exportable(model, cfg, suppress=suppress_operator)
    write_onnx(
        trace_images(exportable),
        path,
        inputs=["images"],
        outputs=exportable.info.outputs,
        metadata={METADATA_KEY: exportable.info.to_json()},
    )


def read_images(cfg: CfgNode, paths: Sequence[str]) -> tuple[list[Images], str]:
    """Reads a few images (H, W, 3), in the config's pixel format, and says where they are from.

    Raises:
        UserError: no image can be read.
    """
    source = ", ".join(paths) or _find_test_set(cfg)
    if paths:
        files = [file.path for file in find_media(paths) if not file.is_video]
    else:
        files = [Path(record["file_name"]) for record in DatasetCatalog.get(source)]
    images: list[Images] = []
    for file in files[:: max(1, len(files) // _NUM_IMAGES)][:_NUM_IMAGES]:
        with contextlib.suppress(UnreadableMedia):
            images.append(read_bgr(file))
    if not images:
        raise UserError(f"no image of {source} can be read: name others with --images")
    if cfg.INPUT.FORMAT == "RGB":
        images = [np.ascontiguousarray(image[:, :, ::-1]) for image in images]
    return images, f"{len(images)} images of {source}"


def on_cpu(cfg: CfgNode) -> CfgNode:
    """Returns the config for the CPU: graphs hold the device they are traced on."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    return cfg


def _find_test_set(cfg: CfgNode) -> str:
    """Returns the name of the config's first test set whose files are here, or the toy set."""
    starts = read_run_record(Path(cfg.MODEL.WEIGHTS).parent / RUN_FILE)
    sources = starts[-1].get("data", {}) if starts else {}
    for name in cfg.DATASETS.TEST:
        with contextlib.suppress(KeyError, UserError, OSError):  # not registered, or without files
            if name in sources:
                register_source(name, sources[name])
            if DatasetCatalog.get(name):
                return str(name)
    return _TOY_SET

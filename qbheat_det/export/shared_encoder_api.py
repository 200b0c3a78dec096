# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Shared-encoder export: one ONNX file of the encoder, and one of each head that reads it.

Heads trained on the same frozen backbone share preprocessing and backbone, which then run once per
image for all heads.
"""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.data.transforms import ResizeShortestEdge
from torch.export import Dim

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable
from qbheat_det.engine.predict import build_predictor

from .agreement import ExportReport, build_reference, measure_agreement
from .api import TOLERANCE, on_cpu, read_images
from .graph import build_exportable, example_images, trace, trace_images
from .metadata import METADATA_KEY, SHARED_ENCODER_KEY, ExportInfo
from .onnx import suppress_operator, write_onnx
from .runtime import ENCODER, HEAD_PREFIX, Images, SharedEncoderModel
from .shared_encoder import SIZES, BranchHead, SharedEncoder, split_models


def export_shared_encoder(
    configs: Mapping[str, CfgNode],
    folder: Path,
    *,
    images: Sequence[str] = (),
    tolerance: float = TOLERANCE,
    overwrite: bool = False,
) -> dict[str, ExportReport]:
    """Writes ``encoder.onnx`` and ``head_NAME.onnx`` of each head, and compares all with PyTorch.

    Args:
        configs: of each head's weights, by its name; see ``load_run_config``.
        folder: of the files.
        images: see ``export_model``.
        tolerance: see ``Agreement.holds``.
        overwrite: whether files of these names may exist.

    Returns:
        A report for each head, by its name.

    Raises:
        UserError: the backbones or the preprocessing differ, a model cannot be exported, a head
            does not agree with PyTorch, or the folder holds other heads. Nothing is written then.
    """
    _check_folder(folder, configs, overwrite=overwrite)
    configs = {name: on_cpu(cfg) for name, cfg in configs.items()}
    first = next(iter(configs.values()))
    predictors = {name: build_predictor(cfg) for name, cfg in configs.items()}
    encoder, heads = split_models(
        {
            name: build_exportable(predictors[name].model, cfg, suppress=suppress_operator)
            for name, cfg in configs.items()
        }
    )
    examples, source = read_images(first, images)
    if encoder.multiple_of:
        examples = _without_padding(examples, first, encoder.multiple_of)
        source = f"{len(examples)} of {source}, whose sizes need no padding"
    reports = {}
    with tempfile.TemporaryDirectory() as temporary:
        _write(encoder, heads, Path(temporary))
        for name, model in SharedEncoderModel(temporary, device="cpu").heads.items():
            reference = build_reference(predictors[name], configs[name], model.info.task)
            reports[name] = measure_agreement(
                model, reference, examples, tolerance=tolerance, source=source
            )
            reports[name].check()
        install(Path(temporary), folder)
    return reports


def _check_folder(folder: Path, heads: Iterable[str], *, overwrite: bool) -> None:
    new = [ENCODER, *(f"{HEAD_PREFIX}{name}.onnx" for name in heads)]
    old = [
        path.name for pattern in (ENCODER, f"{HEAD_PREFIX}*.onnx") for path in folder.glob(pattern)
    ]
    if others := sorted(set(old) - set(new)):
        raise UserError(
            f"--output '{folder}' holds {others[0]}, which would not fit the new encoder: remove "
            "it, or choose another folder"
        )
    if old and not overwrite:
        raise UserError(f"--output '{folder}' holds {old[0]}: use another one, or --overwrite")
    check_writable(folder / ENCODER)


def _write(encoder: SharedEncoder, heads: Mapping[str, BranchHead], folder: Path) -> None:
    shared = json.dumps({"encoder": encoder.hash(), "multiple_of": encoder.multiple_of})
    info = next(iter(heads.values())).info
    outputs = (*encoder.names, SIZES)
    about = ExportInfo("features", outputs, info.pixel_format, config=info.config)
    write_onnx(
        trace_images(encoder),
        folder / ENCODER,
        inputs=["images"],
        outputs=outputs,
        metadata={METADATA_KEY: about.to_json(), SHARED_ENCODER_KEY: shared},
    )
    with torch.no_grad():
        *maps, sizes = encoder(example_images())
    features = dict(zip(encoder.names, maps, strict=True))
    for name, head in heads.items():
        inputs = [features[read] for read in head.names]
        # The exporter finds how the sizes of maps of two strides depend on each other.
        shapes = [dict.fromkeys((0, 2, 3) if x.ndim == 4 else (0,), Dim.AUTO) for x in inputs]
        write_onnx(
            trace(head, (inputs, sizes), (shapes, None)),
            folder / f"{HEAD_PREFIX}{name}.onnx",
            inputs=[*head.names, SIZES],
            outputs=head.info.outputs,
            metadata={METADATA_KEY: head.info.to_json(), SHARED_ENCODER_KEY: shared},
        )


def install(written: Path, folder: Path) -> None:
    """Moves an export into its folder: all of it is on that disk before any file is replaced.

    Args:
        written: folder with the files.
        folder: their destination.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as staging:
        shutil.copytree(written, staging, dirs_exist_ok=True)
        for path in sorted(Path(staging).iterdir()):
            os.replace(path, folder / path.name)


def _without_padding(images: Sequence[Images], cfg: CfgNode, multiple_of: int) -> list[Images]:
    """Returns images of one size, which the resize brings to multiples of a number.

    Raises:
        UserError: there is none.
    """
    limits = (cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST)
    sizes = [image.shape[:2] for image in images]
    fitting = [
        size
        for size in sizes
        if not any(n % multiple_of for n in ResizeShortestEdge.get_output_shape(*size, *limits))
    ]
    if not fitting:
        raise UserError(
            "the heads pad images differently and share an encoder only if height and width after "
            f"the resize are multiples of {multiple_of}, which holds for no image: name others "
            "with --images, or export each head by itself"
        )
    ((chosen, _),) = Counter(fitting).most_common(1)
    return [image for image, size in zip(images, sizes, strict=True) if size == chosen]

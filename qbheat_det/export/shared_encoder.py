# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Exports several heads on one frozen backbone: one ONNX file for the encoder, and one per head.

The encoder consists of preprocessing and backbone, and runs once per image for all heads.
"""

import copy
import hashlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from detectron2.config import CfgNode
from detectron2.modeling import FPN
from torch import Tensor, nn
from torch.export import Dim

from qbheat_det.config import with_values
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, hash_tensors, write_atomically
from qbheat_det.core.text import join_first
from qbheat_det.inference.exported import (
    ENCODER,
    HEAD_PREFIX,
    METADATA_KEY,
    SHARED_ENCODER_KEY,
    ExportInfo,
    SharedEncoderModel,
)
from qbheat_det.inference.predict import build_predictor
from qbheat_det.modeling.contracts import get_encoder

from .agreement import ExportReport, build_reference, measure_agreement
from .files import ON_CPU, TOLERANCE, read_images, write_onnx
from .graph import ExportableModel, build_exportable, example_images, trace, trace_images

SIZES = "sizes"
"""Name of the encoder's last output, int64 (4,): H, W, H', W' before and after the resize."""


class SharedEncoder(nn.Module):
    """Preprocessing and backbone of a model; returns all outputs that at least one head reads."""

    def __init__(self, model: ExportableModel, names: Sequence[str]) -> None:
        super().__init__()
        self.preprocessing = model.preprocessing
        self.backbone = get_encoder(model.backbone)
        self.names = list(names)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Takes images (N, H, W, 3), uint8. Returns the outputs ``names``, and the sizes (4,).

        Feature maps are (N, C, H', W'), and tokens (N, M, D).
        """
        x, sizes = self.preprocessing(images)
        features = self.backbone(x)
        return (*(features[name] for name in self.names), sizes)

    def hash(self) -> str:
        """Returns a hash of the weights and the preprocessing, 16 hexadecimal digits."""
        parts = (
            self.names,
            self.preprocessing.resize,
            self.preprocessing.size_divisibility,
            hash_tensors(_tensors(self)),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class BranchHead(nn.Module):
    """The part of a model that follows the shared encoder: the FPN (if it has one) and the head."""

    def __init__(self, model: ExportableModel) -> None:
        super().__init__()
        self.head = model.head
        self.info = model.info
        self.names = list(model.head.in_features)
        """Names of the encoder's outputs that this head reads."""
        self.fpn: nn.Module | None = None
        fpn = model.backbone
        if isinstance(fpn, FPN):
            self.names = list(fpn.in_features)
            # The second argument replaces bottom_up by the identity in the copy, because the input
            # of the copy is the output of the encoder.
            self.fpn = copy.deepcopy(fpn, {id(fpn.bottom_up): nn.Identity()})

    def forward(self, maps: list[Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        """Takes encoder outputs in the order of ``names``, and returns the model's outputs."""
        features = dict(zip(self.names, maps, strict=True))
        if self.fpn is not None:
            features = self.fpn(features)
        return cast(tuple[Tensor, ...], self.head(features, sizes))


def split_models(
    models: Mapping[str, ExportableModel],
) -> tuple[SharedEncoder, dict[str, BranchHead]]:
    """Splits models into the encoder that they share, and their heads.

    ``models`` and the returned heads are keyed by the name of the head. Raises a ``UserError`` if
    the backbones or the preprocessing of the models differ.
    """
    # Some outputs, such as s16_expanded, come from layers that not every model has. Each model is
    # compared with the model that has the most tensors.
    largest = max(models, key=lambda name: len(get_encoder(models[name].backbone).state_dict()))
    for name, model in models.items():
        differences = _find_differences(models[largest], model)
        if differences:
            raise UserError(
                f"'{largest}' and '{name}' cannot share an encoder: {join_first(differences)} "
                "differ; freeze the backbone with MODEL.BACKBONE.FREEZE_AT"
            )
    heads = {name: BranchHead(model).eval() for name, model in models.items()}
    outputs: list[str] = []  # all outputs of the encoder that a head reads
    for head in heads.values():
        outputs += [name for name in head.names if name not in outputs]
    for model in models.values():
        if set(outputs) <= set(get_encoder(model.backbone).output_shape()):
            return SharedEncoder(model, outputs).eval(), heads
    raise UserError(
        f"no backbone of these models gives every output that the heads read: {outputs}"
    )


def _find_differences(model: ExportableModel, other: ExportableModel) -> list[str]:
    """Returns what prevents ``other`` from using the encoder of ``model``: settings and tensors."""
    ours = model.preprocessing
    theirs = other.preprocessing
    our_backbone = get_encoder(model.backbone)
    their_backbone = get_encoder(other.backbone)
    differs = {
        "INPUT.FORMAT": model.info.pixel_format != other.info.pixel_format,
        "MODEL.PIXEL_MEAN": not ours.mean.equal(theirs.mean),
        "MODEL.PIXEL_STD": not ours.std.equal(theirs.std),
        "the size of test images": ours.resize != theirs.resize,
        "the padding of images": ours.size_divisibility != theirs.size_divisibility,
        "the type of the backbone": type(our_backbone) is not type(their_backbone),
    }
    tensors = _tensors(our_backbone)
    for name, tensor in _tensors(their_backbone).items():
        differs[name] = name not in tensors or not tensor.equal(tensors[name])
    return [key for key, is_different in differs.items() if is_different]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors that affect the outputs, which BatchNorm's count of batches does not."""
    tensors = {}
    for name, tensor in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            tensors[name] = tensor
    return tensors


def export_shared_encoder(
    configs: Mapping[str, CfgNode],
    folder: Path,
    *,
    images: Sequence[str] = (),
    tolerance: float = TOLERANCE,
    overwrite: bool = False,
) -> dict[str, ExportReport]:
    """Writes ``encoder.onnx`` and a ``head_NAME.onnx`` per head, if all agree with PyTorch.

    Args:
        configs: the config of each head's weights, by head name.
        folder: folder for the files.
        images: files and folders of images for the comparison; by default, images of blood cells in
            the package.
        tolerance: largest allowed difference of scores, and of boxes relative to the image's side.
        overwrite: whether to replace existing files.

    Raises:
        UserError: the models cannot be exported, or they share no encoder. Or a head does not agree
            with PyTorch, or the folder contains other heads. Then nothing is written.
    """
    _check_folder(folder, configs, overwrite=overwrite)
    configs = {name: with_values(cfg, ON_CPU) for name, cfg in configs.items()}
    predictors = {name: build_predictor(cfg) for name, cfg in configs.items()}
    models = {name: build_exportable(predictors[name].model, cfg) for name, cfg in configs.items()}
    encoder, heads = split_models(models)
    examples, source = read_images(next(iter(configs.values())), images)
    reports = {}
    with tempfile.TemporaryDirectory() as temporary:
        _write(encoder, heads, Path(temporary))
        for name, model in SharedEncoderModel(temporary, device="cpu").heads.items():
            reference = build_reference(predictors[name], configs[name], model.info.task)
            reports[name] = measure_agreement(
                model, reference, examples, tolerance=tolerance, source=source
            )
            reports[name].check()
        for path in sorted(Path(temporary).iterdir()):
            write_atomically(folder / path.name, path.read_bytes())
    return reports


def _check_folder(folder: Path, heads: Iterable[str], *, overwrite: bool) -> None:
    """Raises a ``UserError`` if the files cannot be written to the folder, or would be mixed up.

    Heads that stay in the folder would not fit the new encoder.
    """
    new = [ENCODER, *(f"{HEAD_PREFIX}{name}.onnx" for name in heads)]
    old_paths = [*folder.glob(ENCODER), *folder.glob(f"{HEAD_PREFIX}*.onnx")]
    old = [path.name for path in old_paths]
    remaining = sorted(set(old) - set(new))
    if remaining:
        raise UserError(
            f"--output '{folder}' contains {remaining[0]}, which does not fit the new encoder"
        )
    if old and not overwrite:
        raise UserError(
            f"--output '{folder}' contains {old[0]}: choose another folder, or add --overwrite"
        )
    check_writable(folder / ENCODER)


def _write(encoder: SharedEncoder, heads: Mapping[str, BranchHead], folder: Path) -> None:
    """Traces the encoder and the heads, and writes a file for each."""
    first_head = next(iter(heads.values()))
    encoder_outputs = (*encoder.names, SIZES)
    encoder_info = ExportInfo(
        "features",
        encoder_outputs,
        first_head.info.pixel_format,
        config=first_head.info.config,
    )
    encoder_hash = encoder.hash()
    write_onnx(
        trace_images(encoder),
        folder / ENCODER,
        ["images"],
        encoder_outputs,
        {METADATA_KEY: encoder_info.to_json(), SHARED_ENCODER_KEY: encoder_hash},
    )
    with torch.no_grad():
        *maps, sizes = encoder(example_images())
    features = dict(zip(encoder.names, maps, strict=True))
    for name, head in heads.items():
        inputs = [features[feature_name] for feature_name in head.names]
        # The exporter infers how the sizes of feature maps with different strides are related.
        variable_shapes = []
        for x in inputs:
            variable_axes = (0, 2, 3) if x.ndim == 4 else (0,)  # feature maps, or tokens
            variable_shapes.append(dict.fromkeys(variable_axes, Dim.AUTO))
        program = trace(head, (inputs, sizes), (variable_shapes, None))
        write_onnx(
            program,
            folder / f"{HEAD_PREFIX}{name}.onnx",
            [*head.names, SIZES],
            head.info.outputs,
            {METADATA_KEY: head.info.to_json(), SHARED_ENCODER_KEY: encoder_hash},
        )

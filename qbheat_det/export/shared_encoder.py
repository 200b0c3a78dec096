# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Exports several heads on one frozen backbone: one ONNX file for the encoder, and one per head.

The encoder consists of preprocessing and backbone, and runs once per image for all heads.

Models may pad images differently: a RetinaNet pads them, because its FPN needs feature maps whose
sides are multiples of the coarser map's, and an MF-DETR does not. Mobile-Former attends to the
whole map, so padding changes all its features. No single run gives the features of both. The
encoder therefore pads as little as any of the models. An FPN that needs more pads the feature maps
instead of the image, with zeros on the right and at the bottom (``pad_maps``).
"""

import copy
import hashlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultPredictor
from detectron2.modeling import FPN, Backbone
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

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
    Images,
    Outputs,
    SharedEncoderModel,
)
from qbheat_det.inference.predict import build_predictor
from qbheat_det.modeling.backbone import MobileFormer
from qbheat_det.modeling.contracts import get_encoder

from .agreement import (
    Agreement,
    ExportReport,
    Reference,
    build_reference,
    compare_detections,
    measure_agreement,
)
from .files import ON_CPU, TOLERANCE, read_images, write_onnx
from .graph import (
    ExportableModel,
    Preprocessing,
    build_exportable,
    example_images,
    trace,
    trace_images,
)

SIZES = "sizes"
"""Name of the encoder's last output, int64 (4,): H, W, H', W' before and after the resize."""
_CONFIDENT = 0.5  # lowest score of the detections for which the effect of padding is described
_MAX_CHANGE = 0.05  # detections with scores up to 0.55 may be missing in the other result


class SharedEncoder(nn.Module):
    """Preprocessing and backbone; returns all outputs that at least one head reads."""

    def __init__(
        self, preprocessing: Preprocessing, backbone: Backbone, names: Sequence[str]
    ) -> None:
        super().__init__()
        self.preprocessing = preprocessing
        self.backbone = backbone
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

    def __init__(self, model: ExportableModel, *, pads_maps: bool = False) -> None:
        """If ``pads_maps``, the feature maps are padded instead of the image."""
        super().__init__()
        self.head = model.head
        self.info = model.info
        self.names = list(model.head.in_features)
        """Names of the encoder's outputs that this head reads."""
        self.fpn: nn.Module | None = None
        self.strides: list[int] = []
        """Strides of the feature maps that are padded, or an empty list."""
        fpn = model.backbone
        if isinstance(fpn, FPN):
            self.names = list(fpn.in_features)
            if pads_maps:
                self.strides = list_strides(fpn)
            # The second argument replaces bottom_up by the identity in the copy, because the input
            # of the copy is the output of the encoder.
            self.fpn = copy.deepcopy(fpn, {id(fpn.bottom_up): nn.Identity()})

    def forward(self, maps: list[Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        """Takes encoder outputs in the order of ``names``, and returns the model's outputs."""
        if self.strides:
            maps = pad_maps(maps, self.strides)
        features = dict(zip(self.names, maps, strict=True))
        if self.fpn is not None:
            features = self.fpn(features)
        return cast(tuple[Tensor, ...], self.head(features, sizes))


class MapPaddingEncoder(Backbone):
    """The encoder of an FPN, which pads feature maps as the heads of a shared encoder do."""

    def __init__(self, fpn: FPN) -> None:
        super().__init__()
        self.encoder = fpn.bottom_up
        self.names = list(fpn.in_features)
        self.strides = list_strides(fpn)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Takes normalized images (N, 3, H, W). Returns the feature maps that the FPN reads."""
        features = self.encoder(x)
        maps = pad_maps([features[name] for name in self.names], self.strides)
        return dict(zip(self.names, maps, strict=True))


def list_strides(fpn: FPN) -> list[int]:
    """Returns the strides of the feature maps that an FPN reads, in ascending order."""
    shapes = fpn.bottom_up.output_shape()
    return [shapes[name].stride for name in fpn.in_features]


def pad_maps(maps: Sequence[Tensor], strides: Sequence[int]) -> list[Tensor]:
    """Pads the maps (N, C, H', W') of an image of any size to the sizes that an FPN needs.

    ``strides`` are in ascending order. Zeros are added on the right and at the bottom, so that the
    coarsest map has the same height and width as each other map divided by the ratio of strides.
    These are the sizes of the maps if the image is padded to a multiple of the largest stride.
    """
    height, width = maps[-1].shape[2:]
    padded = []
    for x, stride in zip(maps, strides, strict=True):
        ratio = strides[-1] // stride
        padded.append(F.pad(x, (0, ratio * width - x.shape[3], 0, ratio * height - x.shape[2])))
    return padded


def split_models(
    models: Mapping[str, ExportableModel],
) -> tuple[SharedEncoder, dict[str, BranchHead]]:
    """Splits models into the encoder that they share, and their heads.

    ``models`` and the returned heads are keyed by the name of the head. Raises a ``UserError`` if
    the backbones or the preprocessing of the models differ. Only the padding may differ.
    """
    # Some outputs, such as s16_expanded, come from layers that not every model has. Each model is
    # compared with the model that has the most tensors.
    largest = max(models, key=lambda name: len(get_encoder(models[name].backbone).state_dict()))
    for name, model in models.items():
        hints = _find_differences(models[largest], model)
        if hints:
            raise UserError(
                f"'{largest}' and '{name}' cannot share an encoder: {join_first(hints)} differ: "
                f"{next(iter(hints.values()))}"
            )
    least_padding = min(
        (model.preprocessing for model in models.values()), key=lambda part: part.size_divisibility
    )
    heads = {}
    for name, model in models.items():
        divisibility = model.preprocessing.size_divisibility
        pads_maps = divisibility != least_padding.size_divisibility
        needs_padding = get_encoder(model.backbone).size_divisibility > 1
        if pads_maps and (needs_padding or not isinstance(model.backbone, FPN)):
            raise UserError(
                f"'{name}' pads images to multiples of {divisibility}, and another model to "
                f"multiples of {max(1, least_padding.size_divisibility)}: they cannot share an "
                "encoder, because only an FPN on an encoder for images of any size can pad feature "
                "maps instead; export each model alone"
            )
        heads[name] = BranchHead(model, pads_maps=pads_maps).eval()
    outputs: list[str] = []  # all outputs of the encoder that a head reads
    for head in heads.values():
        outputs += [name for name in head.names if name not in outputs]
    for model in models.values():
        backbone = get_encoder(model.backbone)
        if set(outputs) <= set(backbone.output_shape()):
            return SharedEncoder(least_padding, backbone, outputs).eval(), heads
    # Each head reads other outputs of the same network.
    backbone = get_encoder(models[largest].backbone)
    if isinstance(backbone, MobileFormer):
        backbone = backbone.with_outputs(outputs)
        return SharedEncoder(least_padding, backbone, outputs).eval(), heads
    raise UserError(
        f"no backbone of these models gives every output that the heads read: {outputs}"
    )


def _find_differences(model: ExportableModel, other: ExportableModel) -> dict[str, str]:
    """Returns what prevents ``other`` from using the encoder of ``model``, with a hint for each."""
    ours = model.preprocessing
    theirs = other.preprocessing
    our_backbone = get_encoder(model.backbone)
    their_backbone = get_encoder(other.backbone)
    retrain = "train all heads on one encoder, with the same pixel statistics and channel order"
    resize = "name INPUT.MIN_SIZE_TEST and INPUT.MAX_SIZE_TEST at the end of the command"
    if type(ours.resize) is not type(theirs.resize):
        resize = "a classifier reads a square crop, and a detector the whole image"
    hints = {}
    if model.info.pixel_format != other.info.pixel_format:
        hints["INPUT.FORMAT"] = retrain
    if not ours.mean.equal(theirs.mean):
        hints["MODEL.PIXEL_MEAN"] = retrain
    if not ours.std.equal(theirs.std):
        hints["MODEL.PIXEL_STD"] = retrain
    if ours.resize != theirs.resize:
        hints["the size of test images"] = resize
    if type(our_backbone) is not type(their_backbone):
        hints["the type of the backbone"] = retrain
    tensors = _tensors(our_backbone)
    for name, tensor in _tensors(their_backbone).items():
        if name not in tensors or not tensor.equal(tensors[name]):
            hints[name] = "train all heads from the same weights with MODEL.BACKBONE.FREEZE_AT 5"
    return hints


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
            alone = build_reference(predictors[name], configs[name], model.info.task)
            reference = alone
            about = source
            if heads[name].strides:
                predictor = _pad_maps_of(predictors[name], encoder.preprocessing.size_divisibility)
                reference = build_reference(predictor, configs[name], model.info.task)
                about += f"; {_describe_padding(reference, alone, examples)}"
            reports[name] = measure_agreement(
                model, reference, examples, tolerance=tolerance, source=about
            )
            reports[name].check()
        for path in sorted(Path(temporary).iterdir()):
            write_atomically(folder / path.name, path.read_bytes())
    return reports


def _pad_maps_of(predictor: DefaultPredictor, size_divisibility: int) -> DefaultPredictor:
    """Returns a copy of the predictor of a model with FPN that pads feature maps.

    The image is only padded to multiples of ``size_divisibility``, as by the shared encoder.
    """
    predictor = copy.copy(predictor)
    predictor.model = copy.deepcopy(predictor.model)
    fpn = predictor.model.backbone
    fpn.bottom_up = MapPaddingEncoder(fpn)
    fpn._size_divisibility = size_divisibility
    return predictor


def _describe_padding(reference: Reference, alone: Reference, images: Sequence[Images]) -> str:
    """Returns a text about the differences between padded feature maps and padded images."""
    row = Agreement(batch_size=1)
    for image in images:
        ours = _keep_confident(reference(image))
        theirs = _keep_confident(alone(image))
        size = image.shape[:2]
        compare_detections(row, ours, theirs, _CONFIDENT, size, tolerance=_MAX_CHANGE)
    text = "feature maps are padded instead of the image, which"
    if row.score == 0 and row.box == 0 and row.unmatched == 0:
        return f"{text} changes nothing at the sizes of these images"
    return (
        f"{text} changes the {row.num_values} scores above {_CONFIDENT} by up to {row.score:.2f} "
        f"and their boxes by up to {row.box:.1f} pixels; detections that only the model alone or "
        f"only the file has: {row.unmatched}"
    )


def _keep_confident(outputs: Outputs) -> Outputs:
    """Returns the detections of one image whose scores are at least ``_CONFIDENT``."""
    is_kept = outputs["scores"][0] >= _CONFIDENT  # (R,)
    kept = {name: outputs[name][:, is_kept] for name in ("boxes", "scores", "labels")}
    return {**kept, "counts": is_kept.sum(keepdims=True)}


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

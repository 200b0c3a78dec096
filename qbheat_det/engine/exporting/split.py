# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One encoder and several heads as files of their own: the encoder runs once, then every head.

Heads that were trained on the same frozen backbone differ in what stands behind it. What stands
before and in it is the same network on the same pixels, and is exported once.
"""

import copy
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qbheat_det.checkpoint import load_embedded_config
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone.bare import build_bare_backbone
from qbheat_det.modeling.contracts import get_encoder

from .deployable import DeployableModel, Encoder
from .export_info import ExportInfo
from .pixels import CentreSquare, Normalisation, ShortestEdge

SIZES = "sizes"
"""Name of the encoder's last output, (4,), int64: H, W, H', W' before and after the resize."""


class SharedEncoder(nn.Module):
    """An encoder whose outputs stand in a fixed order, the sizes behind them."""

    def __init__(self, *, encoder: Encoder, names: Sequence[str]) -> None:
        """
        Args:
            encoder: from bytes to a backbone's outputs.
            names: of the outputs that some head reads.
        """
        super().__init__()
        self.encoder = encoder
        self.names = list(names)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """
        Args:
            images: (N, H, W, 3), uint8.

        Returns:
            The maps (N, C, H', W') and tokens (N, M, D) that ``names`` names, and ``SIZES``.
        """
        features, sizes = self.encoder(images)
        return (*(features[name] for name in self.names), sizes)


class SplitHead(nn.Module):
    """What one model does with the outputs of the shared encoder."""

    def __init__(self, *, names: Sequence[str], pyramid: nn.Module | None, head: nn.Module) -> None:
        """
        Args:
            names: of the outputs that are read.
            pyramid: from these to what ``head`` reads, where it does not read them itself.
            head: of a ``DeployableModel``.
        """
        super().__init__()
        self.names = list(names)
        self.pyramid = pyramid
        self.head = head

    def forward(self, maps: list[Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        """
        Args:
            maps: the encoder's outputs that ``names`` names.
            sizes: see ``SIZES``.

        Returns:
            What the whole model gives, see ``ExportInfo``.
        """
        features: Mapping[str, Tensor] = dict(zip(self.names, maps, strict=True))
        if self.pyramid is not None:
            features = self.pyramid(features)
        outputs: tuple[Tensor, ...] = self.head(features, sizes)
        return outputs


@dataclass(frozen=True)
class SplitParts:
    """An encoder, and the heads that share its pass.

    Attributes:
        encoder: of all of them.
        heads: by name.
        encoder_info: what the encoder's file says of itself.
        infos: what each head's file does, by name.
        multiple_of: where not 0, the heads pad differently, and share a pass only on images whose
            resized height and width are multiples of this; 0 where any size will do.
        identity: of weights and pre-processing of the encoder, so that no head runs on another.
    """

    encoder: SharedEncoder
    heads: dict[str, SplitHead]
    encoder_info: ExportInfo
    infos: dict[str, ExportInfo]
    multiple_of: int
    identity: str


def split_models(models: Mapping[str, DeployableModel]) -> SplitParts:
    """Takes models apart behind the backbone that they share.

    Args:
        models: by name of the head, in evaluation mode.

    Raises:
        UserError: their backbones or their pre-processing differ; the sentence says where.
    """
    names = list(models)
    first = models[names[0]]
    bare = {name: _bare_backbone(model) for name, model in models.items()}
    fullest = max(names, key=lambda name: len(bare[name].state_dict()))
    for name in names:
        _check_pixels(names[0], first, name, models[name])
        _check_backbone(fullest, bare[fullest], name, bare[name])
    heads = {name: _take_head(model) for name, model in models.items()}
    wanted = {read: None for head in heads.values() for read in head.names}  # in order, once each
    backbone = _with_outputs(list(wanted), models, bare[fullest])
    divisors = {name: _divisor(model) for name, model in models.items()}
    common = math.lcm(*divisors.values())
    encoder = Encoder(
        resize=first.encoder.resize,
        normalise=_pad_to(first.encoder.normalise, common),
        backbone=backbone,
    )
    shared = SharedEncoder(encoder=encoder, names=list(wanted)).eval()
    return SplitParts(
        encoder=shared,
        heads=heads,
        encoder_info=dataclasses.replace(
            first.info,
            task="features",
            outputs=(*wanted, SIZES),
            class_names=(),
            category_ids=(),
            score_threshold=0.0,
        ),
        infos={name: model.info for name, model in models.items()},
        multiple_of=0 if len(set(divisors.values())) == 1 else common,
        identity=_identify(shared),
    )


def _bare_backbone(model: DeployableModel) -> nn.Module:
    backbone = model.encoder.backbone
    return get_encoder(backbone)


def _take_head(model: DeployableModel) -> SplitHead:
    backbone = model.encoder.backbone
    bottom_up = getattr(backbone, "bottom_up", None)
    if bottom_up is None:
        read = _read_by(model)
        return SplitHead(names=read, pyramid=None, head=model.head).eval()
    # A pyramid calls what stands below it; here that has been called before.
    pyramid = copy.deepcopy(backbone, {id(bottom_up): nn.Identity()})
    names: Any = backbone.in_features
    return SplitHead(names=names, pyramid=pyramid, head=model.head).eval()


def _read_by(model: DeployableModel) -> list[str]:
    """Names of the backbone's outputs that a model's head reads, where it reads them itself."""
    decoder = getattr(model.head, "decoder", None)
    pool = getattr(decoder, "pool", None)
    read = getattr(model.head, "in_features", None) or getattr(pool, "in_features", None)
    return list(read or model.info.outputs)


def _check_pixels(one: str, first: DeployableModel, other: str, model: DeployableModel) -> None:
    for key, mine, theirs in zip(
        ("INPUT.FORMAT", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "the size of test images"),
        _pixels(first),
        _pixels(model),
        strict=True,
    ):
        if mine != theirs:
            raise UserError(
                f"'{one}' and '{other}' cannot share an encoder pass, since they see other "
                f"pixels: {key} is {mine} there and {theirs} here"
            )


def _pixels(model: DeployableModel) -> tuple[str, list[float], list[float], str]:
    encoder = model.encoder
    return (
        model.info.pixel_format,
        encoder.normalise.mean.flatten().tolist(),
        encoder.normalise.std.flatten().tolist(),
        _describe_resize(encoder.resize),
    )


def _describe_resize(resize: ShortestEdge | CentreSquare) -> str:
    if isinstance(resize, CentreSquare):
        return f"a square of {resize.size} pixels from {resize.share:g} of the shorter side"
    return f"{resize.min_size} to {resize.max_size} pixels"


def _check_backbone(one: str, fullest: nn.Module, other: str, backbone: nn.Module) -> None:
    mine, theirs = _weights(fullest), _weights(backbone)
    same_kind = type(fullest) is type(backbone)
    different = _differing(mine, theirs)
    if different or not same_kind:
        kinds = f"{type(fullest).__name__} and {type(backbone).__name__}"
        what = (
            f"{len(different)} of {len(theirs)} tensors differ, such as {different[0]}"
            if same_kind
            else f"they are {kinds}"
        )
        raise UserError(
            f"'{one}' and '{other}' cannot share an encoder pass, since their backbones are not "
            f"the same: {what}. Train the heads on one frozen backbone (MODEL.BACKBONE.FREEZE_AT), "
            "or export each on its own"
        )


def _differing(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """Names of ``theirs`` that ``mine`` has not, or with other values."""
    return [
        name
        for name, tensor in theirs.items()
        if name not in mine or mine[name].shape != tensor.shape or not mine[name].equal(tensor)
    ]


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """What the outputs depend on: how many batches a BatchNorm has seen is not of it."""
    return {
        name: tensor
        for name, tensor in module.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


def _with_outputs(
    wanted: Sequence[str], models: Mapping[str, DeployableModel], fullest: nn.Module
) -> nn.Module:
    """Returns the shared backbone, giving all that is wanted."""
    for model in models.values():
        if set(wanted) <= set(_outputs_of(_bare_backbone(model))):
            return _bare_backbone(model)
    for name, model in models.items():
        if _bare_backbone(model) is not model.encoder.backbone:
            continue  # what a pyramid asks for is its own
        cfg = load_embedded_config(model.info.config, f"the config of '{name}'")
        for node in (cfg.MODEL.MOBILE_FORMER, cfg.MODEL.TIMM, cfg.MODEL.RESNETS):
            node.OUT_FEATURES = list(wanted)
        backbone = build_bare_backbone(cfg).eval()
        backbone.load_state_dict(fullest.state_dict(), strict=False)
        if _differing(_weights(fullest), _weights(backbone)):
            continue
        return backbone
    raise UserError(
        f"the heads read {', '.join(wanted)} together, and none of the models' backbones gives "
        "all of these: export each on its own"
    )


def _outputs_of(backbone: nn.Module) -> list[str]:
    shapes: Mapping[str, object] = backbone.output_shape()  # type: ignore[operator]
    return list(shapes)


def _divisor(model: DeployableModel) -> int:
    return max(model.encoder.normalise.divisor, 1)


def _pad_to(normalise: Normalisation, divisor: int) -> Normalisation:
    return Normalisation(
        mean=normalise.mean.flatten().tolist(),
        std=normalise.std.flatten().tolist(),
        size_divisibility=divisor,
    )


def _identify(encoder: SharedEncoder) -> str:
    own = encoder.encoder
    digest = hashlib.sha256()
    settings = (encoder.names, _describe_resize(own.resize), own.normalise.divisor)
    digest.update(repr(settings).encode())
    for name, tensor in sorted(_weights(own).items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]

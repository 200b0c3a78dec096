# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The bare backbone of trained weights as a weights file."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from detectron2.config import CfgNode
from torch import Tensor

from qbheat_det.checkpoint import (
    WeightsInfo,
    bare_backbone,
    check_exact,
    fit_weights,
    load_run_config,
    read_weights,
    save_weights,
)
from qbheat_det.core.errors import UserError
from qbheat_det.data import load_image_folders
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from qbheat_det.probing.batch_norm import read_whole_images, recalibrate_bn, training_records


def export_backbone(
    weights: str,
    output: Path,
    *,
    overwrite: bool = False,
    num_images: int = 0,
    image_folders: Sequence[str] = (),
    opts: Sequence[str] = (),
) -> tuple[int, int]:
    """Writes the backbone of ``weights``, names without prefix, with its description.

    Args:
        weights: of any model with a child ``backbone``; of an FPN, its ``bottom_up`` is taken.
        output: a ``.safetensors``, which any config with this backbone takes as ``MODEL.WEIGHTS``.
        overwrite: whether ``output`` may exist.
        num_images: if not 0, recalibrate BatchNorm on this many whole images.
        image_folders: of these images; by default the training set of the weights' config.
        opts: overrides of that config, ``KEY VALUE``.

    Returns:
        The number of tensors written, and of images used.

    Raises:
        UserError: the weights have no backbone or cannot be read, or ``output`` cannot be written.
    """
    if output.suffix != ".safetensors":
        raise UserError(f"'{output}' must end in .safetensors")
    if output.exists() and not overwrite:
        raise UserError(f"'{output}' exists: choose another name, or pass --overwrite")
    if (image_folders or opts) and not num_images:
        raise UserError("--image-folder and config overrides need --recalibrate-bn")
    state, info = read_weights(weights)
    names = bare_backbone(state)
    if not names:
        raise UserError(f"'{weights}' has no tensors named 'backbone.…'")
    backbone = {short: state[name] for name, short in names.items()}
    images: list[Tensor] = []
    if num_images:
        cfg = load_run_config(weights, opts=opts)
        records = load_image_folders(image_folders)[0] if image_folders else training_records(cfg)
        images = read_whole_images(cfg, records, num_images)
        backbone = _recalibrate(backbone, weights, cfg, images)
    # The rest of the description is about the model around it.
    info = dataclasses.replace(
        info or WeightsInfo(), class_names=(), category_ids=(), pretrain_only_modules=()
    )
    save_weights(str(output), backbone, info)
    return len(backbone), len(images)


def _recalibrate(
    state: Mapping[str, Tensor], weights: str, cfg: CfgNode, images: Sequence[Tensor]
) -> dict[str, Tensor]:
    backbone = build_bare_backbone(cfg).to(cfg.MODEL.DEVICE)
    fitting, report = fit_weights(state, backbone.state_dict(), file=weights)
    check_exact(report, "name the config that belongs to these weights")
    backbone.load_state_dict(fitting, strict=False)
    num_norms = recalibrate_bn(
        backbone, images, pixel_mean=cfg.MODEL.PIXEL_MEAN, pixel_std=cfg.MODEL.PIXEL_STD
    )
    if not num_norms:
        raise UserError(f"the backbone of '{weights}' has no BatchNorm to recalibrate")
    return dict(backbone.state_dict())

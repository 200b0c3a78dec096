# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The bare backbone of trained weights as a file of its own."""

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
from qbheat_det.modeling.backbone.bare import build_bare_backbone as build_bare_backbone
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
        weights: of any model with a child ``backbone``; of a pyramid, it is what stands below.
        output: a ``.safetensors``; ``MODEL.WEIGHTS`` of any config with this backbone can name it.
        overwrite: whether ``output`` may exist.
        num_images: where not 0, estimate BatchNorm's statistics anew on that many whole images.
        image_folders: where these images are; the training set of the weights' config if empty.
        opts: overrides of that config, ``KEY VALUE``.

    Returns:
        The number of tensors written, and of images that statistics were estimated on.

    Raises:
        UserError: the weights hold no backbone, cannot be read, or ``output`` is not to be written.
    """
    _check_output(output, overwrite=overwrite)
    if (image_folders or opts) and not num_images:
        raise UserError("images and config keys are only used to estimate BatchNorm's statistics")
    state, info = read_weights(weights)
    names = bare_backbone(state)
    if not names:
        raise UserError(
            f"'{weights}' has no tensors named 'backbone.…', such as checkpoints of training have"
        )
    bare = {short: state[name] for name, short in names.items()}
    images: list[Tensor] = []
    if num_images:
        cfg = load_run_config(weights, opts=opts)
        records = load_image_folders(image_folders)[0] if image_folders else training_records(cfg)
        images = read_whole_images(cfg, records, num_images)
        bare = _recalibrate(bare, weights, cfg, images)
    # What belongs to the model around it is not in the file.
    info = dataclasses.replace(
        info or WeightsInfo(), class_names=(), category_ids=(), pretrain_only_modules=()
    )
    save_weights(str(output), bare, info)
    return len(bare), len(images)


def _check_output(output: Path, *, overwrite: bool) -> None:
    if output.suffix != ".safetensors":
        raise UserError(f"'{output}' must end in .safetensors")
    if output.is_dir():
        raise UserError(f"'{output}' is a folder: name a file in it")
    if output.exists() and not overwrite:
        raise UserError(f"'{output}' exists: name another file, or ask for it with --overwrite")


def _recalibrate(
    bare: Mapping[str, Tensor], weights: str, cfg: CfgNode, images: Sequence[Tensor]
) -> dict[str, Tensor]:
    backbone = build_bare_backbone(cfg).to(cfg.MODEL.DEVICE)
    fitting, report = fit_weights(bare, backbone.state_dict(), file=weights)
    check_exact(report, "name the config that belongs to these weights")
    backbone.load_state_dict(fitting, strict=False)
    num_norms = recalibrate_bn(
        backbone, images, pixel_mean=cfg.MODEL.PIXEL_MEAN, pixel_std=cfg.MODEL.PIXEL_STD
    )
    if not num_norms:
        raise UserError(f"the backbone of '{weights}' has no BatchNorm whose statistics could move")
    return dict(backbone.state_dict())

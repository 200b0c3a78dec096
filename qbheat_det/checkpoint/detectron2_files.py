# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads the ``.pkl`` files of Detectron2's model zoo, and matches their names as Detectron2 does.

The zoo has three kinds of files, all with NumPy arrays:

- Trained models: ``{"model": {...}, "__author__": "Detectron2 Model Zoo"}``.
- Networks of other projects, such as torchvision's: the same, with ``matching_heuristics``.
- Caffe2: ``{"blobs": {...}}``, or the blobs alone, as in ``ImageNetPretrained/MSRA/R-50.pkl``.

The arrays of a state dict alone, whose names have dots, are read too.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from detectron2.checkpoint.c2_model_loading import (
    align_and_update_state_dicts,
    convert_c2_detectron_names,
)
from detectron2.config import get_cfg as get_detectron2_cfg
from detectron2.data.datasets.builtin_meta import COCO_CATEGORIES
from torch import Tensor

from qbheat_det.config import dump_config, load_config, with_values
from qbheat_det.core.errors import UserError

from .plain_pickle import read_plain_pickle

HEURISTICS = "matching_heuristics"
"""Key of a file whose names lack the prefixes of the model's parts, such as "roi_heads."."""

_ZOO_AUTHOR = "Detectron2 Model Zoo"
_COCO = [category for category in COCO_CATEGORIES if category["isthing"]]
# The recipes on ResNet-50 that start from files of the zoo, by tensors that such a file has.
_RECIPES = {
    "custom/retinanet_r50_coco.yaml": ("head.cls_score.bias", "backbone.fpn_lateral3.bias"),
    "custom/faster_rcnn_r50_coco.yaml": (
        "roi_heads.box_predictor.cls_score.bias",
        "proposal_generator.rpn_head.conv.bias",
        "backbone.fpn_lateral2.bias",
    ),
}
# The classifier of ImageNet, and a bias before a BatchNorm. Detectron2 has no modules for them.
_UNUSED = re.compile(r"(fc\d+|linear|stem\.fc)\.(weight|bias)|stem\.conv1\.bias")
# The layers whose number of rows gives the number of classes, and how many rows follow them.
_CLASS_BIASES = {
    "roi_heads.box_predictor.cls_score.bias": 1,
    "roi_heads.box_predictor.0.cls_score.bias": 1,  # Cascade R-CNN
}


def read_detectron2_file(path: str) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Reads a ``.pkl`` file without running code.

    Returns:
        The tensors; the other keys of the file; and what is known about the training, as fields of
        ``WeightsInfo``.

    Raises:
        UserError: the file is damaged, names anything but NumPy arrays, or has no weights.
    """
    content = read_plain_pickle(path)
    no_weights = UserError(f"'{path}' contains no weights: expected a dict of named arrays")
    if not isinstance(content, dict):
        raise no_weights
    arrays = content.get("model", content.get("blobs", content))
    if not isinstance(arrays, dict):
        raise no_weights
    state: dict[str, Tensor] = {}
    for name, array in arrays.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise no_weights
        if not name.endswith("_momentum"):  # of Caffe2's optimizer
            state[name] = _to_tensor(path, name, array)
    if not state:
        raise no_weights
    author = content.get("__author__")
    is_caffe2 = not any("." in name for name in state)
    has_heuristics = is_caffe2 or content.get(HEURISTICS) is True
    if is_caffe2:
        state = _rename_caffe2(path, state)
        info = {"pixel_format": "BGR", "pixel_mean": tuple(get_detectron2_cfg().MODEL.PIXEL_MEAN)}
    else:
        info = _find_pixels(state)
    if has_heuristics:
        state = {name: value for name, value in state.items() if not _UNUSED.fullmatch(name)}
    if author == _ZOO_AUTHOR and _count_classes(state) == len(_COCO):
        info |= _describe_coco_model(state)
    rest = {HEURISTICS: True} if has_heuristics else {}
    return state, rest, info


def match_by_suffix(
    stored: Mapping[str, Tensor], model_state: Mapping[str, Tensor], *, file: str
) -> dict[str, Tensor]:
    """Renames tensors whose names are ends of the model's names, with Detectron2's function.

    Tensors that the model lacks keep their names. The shapes are not compared.

    Raises:
        UserError: a name is the end of several of the model's names.
    """
    tensors = list(stored.values())
    # Numbers instead of tensors, because Detectron2's function leaves out those of other shapes.
    numbers = {name: torch.tensor(number) for number, name in enumerate(stored)}
    model_numbers = dict.fromkeys(model_state, torch.tensor(0))
    try:
        aligned = align_and_update_state_dicts(model_numbers, numbers, c2_conversion=False)
    except ValueError as error:
        raise UserError(f"'{file}' fits in more than one part of the model") from error
    renamed = {name: tensors[int(number)] for name, number in aligned.items()}
    # Caffe2's files of 2018 have affine layers instead of norms, as ``FrozenBatchNorm2d`` knows.
    for name in model_state:
        layer, _, statistic = name.rpartition(".")
        weight = renamed.get(f"{layer}.weight")
        if weight is None or name in renamed:
            continue
        if statistic == "running_mean":
            renamed[name] = torch.zeros_like(weight)
        elif statistic == "running_var":
            renamed[name] = torch.ones_like(weight)
    return renamed


def _to_tensor(path: str, name: str, array: np.ndarray[Any, Any]) -> Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError as error:  # such as uint64
        raise UserError(f"'{path}': '{name}' has the type {array.dtype}") from error


def _rename_caffe2(path: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors with Detectron2's names."""
    try:
        renamed, _ = convert_c2_detectron_names(state)
    except (AssertionError, IndexError, ValueError) as error:
        raise UserError(f"'{path}' is not a file of Detectron2 or Caffe2") from error
    return renamed


def _find_pixels(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the pixel statistics that files of older versions of Detectron2 have."""
    mean = state.get("pixel_mean", torch.empty(0)).flatten().tolist()
    std = state.get("pixel_std", torch.empty(0)).flatten().tolist()
    if len(mean) != 3 or len(std) != 3:
        return {}
    # ImageNet's mean is the highest in the red channel.
    pixel_format = "BGR" if mean[0] < mean[2] else "RGB"
    return {"pixel_format": pixel_format, "pixel_mean": tuple(mean), "pixel_std": tuple(std)}


def _describe_coco_model(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the classes of COCO and, if there is a recipe for the model, its config."""
    names = tuple(category["name"] for category in _COCO)
    ids = tuple(category["id"] for category in _COCO)
    info: dict[str, Any] = {"class_names": names, "category_ids": ids}
    last_block = state.get("backbone.bottom_up.res4.5.conv2.weight", torch.empty(0))
    is_resnet50 = last_block.shape == (256, 256, 3, 3)
    is_resnet50 = is_resnet50 and "backbone.bottom_up.res4.6.conv2.weight" not in state
    has_masks = any(name.startswith("roi_heads.mask_head.") for name in state)
    has_keypoints = any(name.startswith("roi_heads.keypoint_head.") for name in state)
    if not is_resnet50 or has_masks or has_keypoints:
        return info
    for recipe, tensors in _RECIPES.items():
        if all(name in state for name in tensors):
            cfg = with_values(
                load_config(recipe),
                {"MODEL.CLASS_NAMES": names, "MODEL.CATEGORY_IDS": ids, "MODEL.WEIGHTS": ""},
            )
            info["config"] = dump_config(cfg)
            info["pixel_format"] = cfg.INPUT.FORMAT
            info["pixel_mean"] = tuple(cfg.MODEL.PIXEL_MEAN)
            info["pixel_std"] = tuple(cfg.MODEL.PIXEL_STD)
    return info


def _count_classes(state: Mapping[str, Tensor]) -> int:
    """Returns the number of classes of a detector; 0 if it is unknown."""
    for name, background in _CLASS_BIASES.items():
        if name in state:
            return len(state[name]) - background
    if "head.cls_score.bias" in state and "head.bbox_pred.bias" in state:  # RetinaNet
        num_anchors = len(state["head.bbox_pred.bias"]) // 4
        return len(state["head.cls_score.bias"]) // max(num_anchors, 1)
    return 0

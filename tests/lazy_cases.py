# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pairs of a LazyConfig and its YAML twin, whole and with a network of some thousand parameters."""

from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode, LazyConfig
from detectron2.config import LazyCall as L
from omegaconf import DictConfig

from qbheat_det.config import load_config
from qbheat_det.engine.setup import use_classes_of
from qbheat_det.modeling.backbone import arch_of_rows

from .engine.gradient_cases import BLOCKS

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
LAZY = sorted((CONFIGS / "lazy").rglob("*.py"))
TOYS = [path for path in LAZY if path.parent.name == "quick_schedules"]

# Of the toy recipes, those that are run, one of each family.
RUN = [path for path in TOYS if path.name.startswith(("retinanet", "mf_detr", "qb_heat"))]
_ARCH = {"num_tokens": 2, "token_dim": 16, "stem": 8, "blocks": BLOCKS, "expanded": 32}
# What makes each model small: keys of the LazyConfig, and the same keys of the YAML config.
_SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "retinanet": (
        {
            "backbone.out_channels": 32,
            "head.conv_dims": [32],
            "test_score_thresh": 0.0,
            "max_detections_per_image": 5,
        },
        {"FPN.OUT_CHANNELS": 32, "RETINANET.NUM_CONVS": 1, "RETINANET.SCORE_THRESH_TEST": 0.0},
    ),
    "mf_detr": (
        {
            "decoder.num_blocks": [1, 1, 1],
            "decoder.num_queries": 5,
            "decoder.widths.dim": 16,
            "decoder.widths.num_heads": 2,
            "decoder.widths.hidden": 16,
        },
        {
            "MF_DETR.NUM_BLOCKS": [1, 1, 1],
            "MF_DETR.NUM_OBJECT_QUERIES": 5,
            "MF_DETR.HIDDEN_DIM": 16,
            "MF_DETR.NHEADS": 2,
            "MF_DETR.DIM_FEEDFORWARD": 16,
        },
    ),
    "qb_heat": (
        {"predictor.dim": 16, "decoder.dim": 16, "decoder.grid_size": 4, "decoder.depth": 1},
        {"QB_HEAT.FEATURE_DIM": 16, "QB_HEAT.DECODER_DIM": 16, "QB_HEAT.DECODER_DEPTH": 1},
    ),
}


def name(path: Path) -> str:
    """Returns what a LazyConfig is called: the path of its twin, without ``.yaml``."""
    return path.relative_to(CONFIGS / "lazy").with_suffix("").as_posix()


def load_twins(path: Path) -> tuple[DictConfig, CfgNode]:
    """Returns a LazyConfig and the YAML config of the same name, with the toy set's classes."""
    twin = load_config(CONFIGS / f"{name(path)}.yaml", ["MODEL.DEVICE", "cpu"])
    if path in TOYS and twin.MODEL.META_ARCHITECTURE != "QBHeat":
        use_classes_of(twin, "qbheat_toy_train")
    return LazyConfig.load(str(path)), twin


def load_small_twins(path: Path) -> tuple[DictConfig, CfgNode]:
    """As ``load_twins``, of a toy recipe, with a small network."""
    lazy, twin = load_twins(path)
    kind = path.name.removesuffix("_285M_toy.py").removesuffix("_211")
    for root, keys in zip((lazy.model, twin.MODEL), _SMALL[kind], strict=True):
        for key, value in keys.items():
            *parents, leaf = key.split(".")
            reduce(getitem, parents, root)[leaf] = value
    bottom = lazy.model.backbone.get("bottom_up", lazy.model.backbone)
    bottom.arch = L(arch_of_rows)(**_ARCH)
    mobile_former = twin.MODEL.MOBILE_FORMER
    mobile_former.VARIANT, mobile_former.BLOCKS = "custom", BLOCKS
    mobile_former.STEM_CHANNELS, mobile_former.EXPANDED_CHANNELS = 8, 32
    mobile_former.NUM_TOKENS, mobile_former.TOKEN_DIM = 2, 16
    twin.TEST.DETECTIONS_PER_IMAGE = 5
    twin.INPUT.PRETRAIN.SIZE = 64
    return lazy, twin

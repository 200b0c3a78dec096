# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Configs of Detectron2's own ``get_cfg``, without the keys of this package."""

import pytest
from detectron2.config import CfgNode, get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, META_ARCH_REGISTRY

import qbheat_det
from qbheat_det.config import reads_our_keys
from qbheat_det.core.errors import UserError
from qbheat_det.data.mappers import DATASET_MAPPERS
from qbheat_det.engine import Trainer

META_ARCHITECTURES = [
    model for _, model in META_ARCH_REGISTRY if model.__module__.startswith("qbheat_det.")
]
NAMES = ("MobileFormer", "build_fpn_backbone", "build_mobile_former_fpn_backbone", "timm:resnet18")
BACKBONES = [BACKBONE_REGISTRY.get(name) for name in NAMES]


def read_key(cfg):
    return cfg.MODEL.MOCO.DIM


@pytest.mark.parametrize(
    "build",
    [
        *META_ARCHITECTURES,
        *BACKBONES,
        *(mapper for name, mapper in DATASET_MAPPERS.items() if name != "default"),
        Trainer,
        reads_our_keys(read_key),
    ],
    ids=lambda build: build.__name__,
)
def test_a_config_without_our_keys_is_explained(build):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.BACKBONE.NAME = "MobileFormer"
    arguments = [cfg]
    if build in DATASET_MAPPERS.values():
        arguments.append(True)
    if build in BACKBONES:
        arguments.append(ShapeSpec(channels=3))
    with pytest.raises(UserError, match=r"the config has no \w+\.\w+.*add_qbheat_config\(cfg\)"):
        build(*arguments)


def test_the_default_mapper_reads_no_key_of_ours():
    assert DATASET_MAPPERS["default"](get_cfg(), True).is_train


@pytest.mark.parametrize("cfg", [get_cfg(), qbheat_det.get_cfg()])
@pytest.mark.parametrize("error", [AttributeError("MY_KEY"), KeyError("DIM"), KeyError()])
def test_other_errors_do_not_change(cfg, error):
    def fail(cfg):
        raise error

    with pytest.raises(type(error)) as caught:
        reads_our_keys(fail)(cfg)
    assert caught.value is error


def test_only_the_first_part_that_is_missing_is_named():
    cfg = qbheat_det.get_cfg()
    assert reads_our_keys(read_key)(cfg) == 128
    del cfg.MODEL.MOCO["DIM"]
    with pytest.raises(UserError, match=r"has no MODEL\.MOCO\.DIM,"):
        reads_our_keys(read_key)(cfg=cfg)
    cfg.MODEL.MOCO = CfgNode()
    with pytest.raises(UserError, match=r"has no MODEL\.MOCO\.DIM,"):
        reads_our_keys(read_key)(cfg)
    del cfg.MODEL["MOCO"]
    with pytest.raises(UserError, match=r"has no MODEL\.MOCO,"):
        reads_our_keys(read_key)(cfg)

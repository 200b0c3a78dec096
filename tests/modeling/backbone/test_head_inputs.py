# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A pyramid has the levels that the heads read, each as in the whole pyramid."""

import itertools

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY, build_backbone
from detectron2.projects.point_rend import add_pointrend_config
from torch import nn

from qbheat_det.checkpoint import SafeCheckpointer
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer
from qbheat_det.modeling.backbone.head_inputs import list_read_levels
from tests.engine.gradient_cases import BLOCKS, SMALL

LEVELS = ["p2", "p3", "p4", "p5", "p6", "p7"]
SUBSETS = [
    [level for level, kept in zip(LEVELS, chosen, strict=True) if kept]
    for chosen in itertools.product([False, True], repeat=len(LEVELS))
    if any(chosen)
]


@META_ARCH_REGISTRY.register()
class UnknownArchitecture(nn.Module):
    """A meta-architecture of another project, that is never built."""


def make_config(read, arch="RetinaNet"):
    cfg = get_cfg()
    cfg.merge_from_list(SMALL.split())
    cfg.MODEL.META_ARCHITECTURE = arch
    cfg.MODEL.MOBILE_FORMER.BLOCKS = BLOCKS
    cfg.MODEL.BACKBONE.NAME = "build_fpn_backbone"
    cfg.MODEL.FPN.update({"IN_FEATURES": ["s4", "s8", "s16"], "TOP_LEVELS": 3})
    cfg.MODEL.RETINANET.IN_FEATURES = read
    return cfg


@pytest.mark.parametrize("read", SUBSETS, ids="-".join)
def test_levels_that_are_read_are_those_of_the_whole_pyramid(read):
    torch.manual_seed(0)
    whole = build_backbone(make_config(LEVELS)).eval()
    assert list(whole.output_shape()) == LEVELS
    pyramid = build_backbone(make_config(read)).eval()
    assert set(read) <= set(pyramid.output_shape())
    unexpected = pyramid.load_state_dict(whole.state_dict(), strict=False).unexpected_keys
    prefixes = tuple(f"{path}." for path in pyramid.optional_modules)
    assert all(name.startswith(prefixes) for name in unexpected)

    x = torch.rand(2, 3, 128, 128)
    expected = whole(x)
    found = pyramid(x)
    total = 0
    for level in read:
        torch.testing.assert_close(found[level], expected[level])
        total = total + found[level].sum()
    # The naive definition of a parameter that is used: it gets a gradient.
    total.backward()
    for name, parameter in pyramid.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None), name


@pytest.mark.parametrize("checkpointer", [SafeCheckpointer, DetectionCheckpointer])
def test_checkpoints_with_levels_that_no_head_reads_load(checkpointer, tmp_path):
    holder = {}
    for name, read in (("whole", LEVELS), ("short", LEVELS[1:5])):
        holder[name] = nn.Module()
        holder[name].backbone = build_backbone(make_config(read))
    path = str(tmp_path / "whole.pth")
    state = holder["whole"].state_dict()
    torch.save({"model": state}, path)
    checkpointer(holder["short"]).load(path)
    loaded = holder["short"].state_dict()
    assert "backbone.top_block.convs.2.weight" in state.keys() - loaded.keys()
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=0)


def test_heads_that_a_config_does_not_build_read_nothing():
    cfg = make_config(["p3", "p4"], arch="GeneralizedRCNN")
    add_pointrend_config(cfg)
    model = cfg.MODEL
    model.RPN.IN_FEATURES = ["p3", "p4", "p5"]
    model.ROI_HEADS.IN_FEATURES = ["p3", "p4"]
    model.ROI_MASK_HEAD.NAME = "PointRendMaskHead"
    read = lambda: " ".join(list_read_levels(cfg, LEVELS))  # noqa: E731
    assert read() == "p3 p4 p5"
    model.MASK_ON = True
    model.POINT_HEAD.IN_FEATURES = ["p7"]
    assert read() == "p2 p3 p4 p5"
    model.ROI_MASK_HEAD.POINT_HEAD_ON = True
    assert read() == "p2 p3 p4 p5 p7"
    model.META_ARCHITECTURE = "PanopticFPN"
    model.MASK_ON = False
    model.SEM_SEG_HEAD.IN_FEATURES = ["p6"]
    assert read() == "p3 p4 p5 p6"
    model.PROPOSAL_GENERATOR.NAME = "PrecomputedProposals"
    assert read() == "p3 p4 p6"
    model.META_ARCHITECTURE = "SyncRetinaNet"  # a subclass of RetinaNet
    assert read() == "p3 p4"
    # The key of a project that this package does not know.
    model.OTHER_HEAD = CfgNode({"IN_FEATURES": ["p5", "res2"]})
    assert read() == "p3 p4 p5"
    model.RETINANET.IN_FEATURES = ["p3", "p8"]  # RetinaNet itself refuses this level
    assert read().split() == LEVELS
    model.META_ARCHITECTURE = "UnknownArchitecture"
    assert read().split() == LEVELS


@pytest.mark.parametrize(
    ("bottom_up", "in_features", "known"),
    [
        ("MobileFormer", ["res2", "res3"], "'s4', 's8', 's16'"),
        ("MobileFormer", [], "'s4', 's8', 's16'"),
        ("timm:resnet18", ["res2", "res3"], "'s4', 's8', 's16', 's32'"),
        ("build_resnet_backbone", ["s8", "s16"], "'res3', 'res4'"),
    ],
)
def test_unknown_outputs_below_a_pyramid_are_refused_by_key(bottom_up, in_features, known):
    cfg = make_config(["p3"])
    cfg.MODEL.FPN.update({"BOTTOM_UP": bottom_up, "IN_FEATURES": in_features})
    with pytest.raises(UserError, match=r"MODEL\.FPN\.IN_FEATURES") as error:
        build_backbone(cfg)
    assert known in str(error.value)


@pytest.mark.parametrize("arch", MOBILE_FORMER_ARCHS)
def test_layers_of_mobile_former_that_no_output_needs_are_not_trained(arch):
    table = MOBILE_FORMER_ARCHS[arch]
    outputs = list(table.output_shapes())
    for names in [*([name] for name in outputs), outputs[:-2]]:
        encoder = MobileFormer(arch=table, out_features=names)
        sum(value.sum() for value in encoder(torch.rand(2, 3, 64, 64)).values()).backward()
        for name, parameter in encoder.named_parameters():
            assert parameter.requires_grad == (parameter.grad is not None), (names, name)

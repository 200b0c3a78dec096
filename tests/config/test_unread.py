# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Overrides that a run does not read are named, with the keys that it reads instead."""

import pytest
import torch
from detectron2.modeling import META_ARCH_REGISTRY
from torch import nn

from qbheat_det.config import describe_unread, find_unread, load_config, warn_of_unread

RETINANET = load_config("custom/retinanet_285M_scratch.yaml")
MF_DETR = load_config("custom/mf_detr_211_285M_scratch.yaml")


def changed(cfg, *words):
    cfg = cfg.clone()
    cfg.merge_from_list(list(words))
    return cfg


@pytest.mark.parametrize(
    ("key", "needed", "words"),
    [
        ("SOLVER.STEPS", "LR_SCHEDULER_NAME WarmupMultiStepLR", []),
        ("SOLVER.MOMENTUM", "OPTIMIZER SGD", []),
        ("SOLVER.EMA.DECAY", "EMA.ENABLED True", []),
        ("SOLVER.BETAS", "OPTIMIZER ADAMW", ["SOLVER.OPTIMIZER", "SGD"]),
    ],
)
def test_an_override_of_another_schedule_is_named_with_what_it_needs(key, needed, words):
    cfg = changed(RETINANET, *words)
    line = f"Overrides without effect on SyncRetinaNet: {key} (it needs SOLVER.{needed})"
    assert describe_unread([(cfg, [key, "SOLVER.BASE_LR"])]) == line
    other, value = needed.split()
    assert describe_unread([(changed(cfg, f"SOLVER.{other}", value), [key])]) == ""


def test_an_empty_value_and_a_schedule_that_reads_the_key_are_fine():
    cfg = changed(RETINANET, "SOLVER.STEPS", "()")
    assert find_unread(cfg, ["SOLVER.STEPS"]) == {}
    cfg = changed(cfg, "SOLVER.LR_SCHEDULER_NAME", "WarmupStepWithFixedGammaLR")
    assert find_unread(cfg, ["SOLVER.GAMMA"]) == {}


@pytest.mark.parametrize(
    ("cfg", "key", "suggested"),
    [
        (RETINANET, "MODEL.FCOS.NMS_THRESH_TEST", "MODEL.RETINANET.NMS_THRESH_TEST"),
        (RETINANET, "MODEL.MF_DETR.NUM_OBJECT_QUERIES", ""),
        (RETINANET, "MODEL.RESNETS.DEPTH", ""),
        (RETINANET, "MODEL.ROI_HEADS.NAME", ""),  # three nodes of it have a NAME
        (MF_DETR, "MODEL.RETINANET.NUM_CLASSES", ""),  # the data set it
        (MF_DETR, "MODEL.RETINANET.ATSS.ENABLED", ""),
    ],
)
def test_an_override_that_no_model_reads_is_named(cfg, key, suggested, caplog):
    torch.manual_seed(0)
    expected = torch.rand(2)[1]
    torch.manual_seed(0)
    torch.rand(1)
    warn_of_unread([cfg], ["MODEL.BACKBONE.FREEZE_AT", "SOLVER.STEPS", key])
    question = f" (do you mean {suggested}?)" if suggested else ""
    name = cfg.MODEL.META_ARCHITECTURE
    assert caplog.messages == [f"Overrides without effect on {name}: {key}{question}"]
    assert torch.rand(1) == expected  # the random state is as before


def test_a_key_that_is_read_only_if_another_is_on_counts_as_read_then():
    key = "MODEL.RETINANET.ATSS.TOP_K"
    assert find_unread(RETINANET, [key]) == {}
    off = changed(RETINANET, "MODEL.RETINANET.ATSS.ENABLED", "False")
    assert list(find_unread(off, [key])) == [key]


def test_one_stage_that_reads_a_key_is_enough_but_only_if_it_has_the_override():
    queries = "MODEL.MF_DETR.NUM_OBJECT_QUERIES"
    assert describe_unread([(RETINANET, [queries]), (MF_DETR, [queries])]) == ""
    line = describe_unread([(RETINANET, [queries]), (MF_DETR, [])])
    assert line == f"Overrides without effect on SyncRetinaNet and MFDETR: {queries}"


def test_values_that_each_joined_detector_replaces_have_no_effect():
    key = "MODEL.RETINANET.NUM_CONVS"
    part = {"MODEL.META_ARCHITECTURE": "SyncRetinaNet", "TEST.DETECTIONS_PER_IMAGE": 9}
    part |= {"MODEL.RETINANET.NUM_CLASSES": 1}
    for parts, expected in (
        ([{**part, key: 1}, {**part, key: 2}], [key]),
        ([{**part, key: 1}, part], []),
    ):
        cfg = changed(RETINANET, "MODEL.META_ARCHITECTURE", "JoinedDetectors")
        cfg.MODEL.JOINED.PARTS = parts
        cfg.MODEL.JOINED.CLASS_INDICES = [[0], [1]]
        cfg.MODEL.CLASS_NAMES = ["a", "b"]
        assert list(find_unread(cfg, [key])) == expected


class _Foreign(nn.Module):
    """A model of another project, which reads values in the ways of dictionaries."""

    def __init__(self, cfg):
        super().__init__()
        node = cfg.MODEL.RETINANET
        node.get("NUM_CONVS")
        assert dict(node.ATSS) == {**cfg.MODEL.RETINANET.ATSS}
        list(cfg.MODEL.FCOS.items())
        if cfg.MODEL.MASK_ON:
            self.cfg = cfg


@pytest.fixture
def foreign():
    META_ARCH_REGISTRY._do_register("Foreign", _Foreign)
    yield changed(RETINANET, "MODEL.META_ARCHITECTURE", "Foreign")
    META_ARCH_REGISTRY._obj_map.pop("Foreign")


def test_models_of_other_projects_read_values_in_any_way(foreign):
    read = ["MODEL.RETINANET.NUM_CONVS", "MODEL.RETINANET.ATSS.TOP_K", "MODEL.FCOS.NUM_CLASSES"]
    unread = "MODEL.RESNETS.DEPTH"
    assert list(find_unread(foreign, [*read, unread])) == [unread]
    keeps_config = changed(foreign, "MODEL.MASK_ON", "True")
    assert find_unread(keeps_config, [unread]) == {}


def test_a_model_that_cannot_be_built_is_left_to_the_run():
    broken = changed(RETINANET, "MODEL.META_ARCHITECTURE", "NoSuchModel")
    assert list(find_unread(broken, ["MODEL.RESNETS.DEPTH", "SOLVER.STEPS"])) == ["SOLVER.STEPS"]

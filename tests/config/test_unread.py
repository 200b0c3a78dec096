# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Overrides that a run does not read are named, with the keys that it reads instead."""

import logging

import pytest

from qbheat_det.config import find_unread, load_config, warn_of_unread

RETINANET = load_config("custom/retinanet_285M_scratch.yaml")
MF_DETR = load_config("custom/mf_detr_211_285M_scratch.yaml")


@pytest.mark.parametrize(
    ("key", "needed"),
    [
        ("SOLVER.STEPS", "SOLVER.LR_SCHEDULER_NAME WarmupMultiStepLR"),
        ("SOLVER.GAMMA", "SOLVER.LR_SCHEDULER_NAME WarmupMultiStepLR"),
        ("SOLVER.MOMENTUM", "SOLVER.OPTIMIZER SGD"),
        ("SOLVER.EMA.DECAY", "SOLVER.EMA.ENABLED True"),
    ],
)
def test_an_override_of_another_schedule_is_named_with_what_it_needs(key, needed, caplog):
    warn_of_unread([RETINANET], [key, "SOLVER.BETAS"])
    assert caplog.messages == [
        f"Overrides without effect on SyncRetinaNet: {key} (it needs {needed})"
    ]
    caplog.clear()
    other, value = needed.split()
    cfg = RETINANET.clone()
    cfg.merge_from_list([other, value])
    warn_of_unread([cfg], [key])
    assert not caplog.messages


@pytest.mark.parametrize(
    ("cfg", "key", "suggestion"),
    [
        (RETINANET, "MODEL.FCOS.NMS_THRESH_TEST", "MODEL.RETINANET.NMS_THRESH_TEST"),
        (RETINANET, "MODEL.MF_DETR.NUM_OBJECT_QUERIES", ""),
        (RETINANET, "MODEL.RESNETS.DEPTH", ""),
        (MF_DETR, "MODEL.RETINANET.NUM_CLASSES", "MODEL.MF_DETR.NUM_CLASSES"),
        (MF_DETR, "MODEL.RETINANET.ATSS.TOP_K", ""),
    ],
)
def test_an_override_that_no_model_reads_is_named(cfg, key, suggestion, caplog):
    warn_of_unread([cfg], ["MODEL.BACKBONE.FREEZE_AT", "SOLVER.BASE_LR", key])
    assert f"without effect on {cfg.MODEL.META_ARCHITECTURE}: {key}" in caplog.text
    assert "FREEZE_AT" not in caplog.text
    assert suggestion in caplog.text
    assert ("do you mean" in caplog.text) == bool(suggestion)


def test_a_key_that_is_read_only_if_another_is_on_counts_as_read_then():
    cfg = RETINANET.clone()
    key = "MODEL.RETINANET.ATSS.TOP_K"
    assert find_unread(cfg, [key]) == []
    cfg.MODEL.RETINANET.ATSS.ENABLED = False
    assert find_unread(cfg, [key]) == [key]


def test_one_of_several_models_is_enough_and_a_model_that_cannot_be_built_is_left_alone(caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_unread([RETINANET, MF_DETR], ["MODEL.MF_DETR.NUM_OBJECT_QUERIES"])
        broken = RETINANET.clone()
        broken.MODEL.META_ARCHITECTURE = "NoSuchModel"
        warn_of_unread([broken], ["MODEL.FCOS.NMS_THRESH_TEST"])
    assert not caplog.text

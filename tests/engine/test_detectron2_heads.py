# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's heads on our pyramid, trained by two processes of Detectron2's own trainer."""

import importlib
import itertools
import math

import pytest
import torch
from detectron2.engine import SimpleTrainer, create_ddp_model
from detectron2.modeling import build_model
from detectron2.structures import BitMasks
from detectron2.utils import comm
from detectron2.utils.events import EventStorage

from qbheat_det.config import get_cfg, get_config_path

from .gradient_cases import BLOCKS, SIZE, SMALL, make_image
from .processes import make_args, run_in_processes

RCNN, RETINANET, FCOS = (f"coco/Base-{name}.yaml" for name in ("RCNN-FPN", "RetinaNet", "FCOS"))
POINT_REND, TENSOR_MASK = "detectron2.projects.point_rend", "tensormask"
ADD_KEYS = {POINT_REND: "add_pointrend_config", TENSOR_MASK: "add_tensormask_config"}
LEVELS = 'MODEL.FPN.IN_FEATURES ["s4","s8","s16"] MODEL.FPN.TOP_LEVELS 3 '
# Both read fewer levels than the pyramid could have.
DENSE = """
MODEL.RETINANET.IN_FEATURES ["p3","p4","p5","p6"] MODEL.FCOS.IN_FEATURES ["p3","p4","p5","p6"]
MODEL.FCOS.NUM_CLASSES 3 MODEL.FCOS.NUM_CONVS 1 MODEL.FCOS.NORM BN
MODEL.ANCHOR_GENERATOR.SIZES [[8],[16],[32],[64]]"""
TWO_STAGE = """
MODEL.ANCHOR_GENERATOR.SIZES [[4],[8],[16],[32],[64]] MODEL.ROI_HEADS.NUM_CLASSES 3
MODEL.ROI_BOX_HEAD.FC_DIM 16 MODEL.ROI_MASK_HEAD.NUM_CONV 1 MODEL.ROI_MASK_HEAD.CONV_DIM 16
MODEL.RPN.POST_NMS_TOPK_TRAIN 50 MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 16"""
POINTS = """
 MODEL.POINT_HEAD.NUM_CLASSES 3 MODEL.POINT_HEAD.FC_DIM 16 MODEL.POINT_HEAD.TRAIN_NUM_POINTS 16
MODEL.ROI_MASK_HEAD.FC_DIM 16"""
POINT_MASKS = """
 MODEL.MASK_ON True MODEL.ROI_MASK_HEAD.NAME PointRendMaskHead MODEL.ROI_MASK_HEAD.POOLER_TYPE ""
MODEL.ROI_MASK_HEAD.POINT_HEAD_ON True"""
SEGMENTS = """
 MODEL.META_ARCHITECTURE SemanticSegmentor MODEL.SEM_SEG_HEAD.NAME PointRendSemSegHead
MODEL.SEM_SEG_HEAD.NUM_CLASSES 3 MODEL.SEM_SEG_HEAD.CONVS_DIM 32"""
TENSORS = """
 MODEL.META_ARCHITECTURE TensorMask MODEL.TENSOR_MASK.NUM_CLASSES 3 MODEL.TENSOR_MASK.NUM_CONVS 1
MODEL.TENSOR_MASK.IN_FEATURES ["p2","p3","p4"] MODEL.ANCHOR_GENERATOR.SIZES [[8],[16],[32]]
MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS [[1.0]] MODEL.MASK_ON True"""
# The shipped config, the project, the overrides, and the levels that then exist.
HEADS = {
    "Faster R-CNN": (RCNN, "", TWO_STAGE, "p2 p3 p4 p5 p6"),
    "Mask R-CNN": (RCNN, "", TWO_STAGE + " MODEL.MASK_ON True", "p2 p3 p4 p5 p6"),
    "RetinaNet": (RETINANET, "", DENSE + " MODEL.META_ARCHITECTURE RetinaNet", "p3 p4 p5 p6"),
    "FCOS": (FCOS, "", DENSE, "p3 p4 p5 p6"),
    "PointRend": (RCNN, POINT_REND, TWO_STAGE + POINTS + POINT_MASKS, "p2 p3 p4 p5 p6"),
    "PointRend's segmentation": (RCNN, POINT_REND, POINTS + SEGMENTS, "p2 p3 p4 p5"),
    "TensorMask": (RCNN, TENSOR_MASK, TENSORS, "p2 p3 p4"),
}


def is_installed(project):
    try:
        importlib.import_module(project)
    except ImportError:
        return False
    return True


def make_batch(indices):
    batch = []
    for index in indices:
        record = make_image(index)
        boxes = record["instances"].gt_boxes.tensor.int().tolist()
        masks = torch.zeros(len(boxes), SIZE, SIZE, dtype=torch.bool)
        for mask, (x0, y0, x1, y1) in zip(masks, boxes, strict=True):
            mask[y0:y1, x0:x1] = True
        record["instances"].gt_masks = BitMasks(masks)
        record["sem_seg"] = torch.arange(SIZE * SIZE).view(SIZE, SIZE) % 3
        batch.append(record)
    return batch


def train_head(name):
    """Trains five steps as Detectron2's ``DefaultTrainer`` does; returns levels and weights."""
    config, project, opts, _ = HEADS[name]
    cfg = get_cfg()
    if project:
        getattr(importlib.import_module(project), ADD_KEYS[project])(cfg)
    cfg.merge_from_file(get_config_path(config))
    cfg.merge_from_list([*SMALL.split(), *LEVELS.split(), *opts.split(), "MODEL.DEVICE", "cpu"])
    cfg.MODEL.MOBILE_FORMER.BLOCKS = BLOCKS
    torch.manual_seed(comm.get_rank())  # DDP gives all processes the weights of the first
    model = build_model(cfg)
    batch = make_batch((0, 1) if comm.get_rank() == 0 else (2, 5))
    trainer = SimpleTrainer(
        create_ddp_model(model, broadcast_buffers=False, device_ids=None),
        itertools.repeat(batch),
        torch.optim.SGD(model.parameters(), lr=1e-3),
    )
    losses = []
    with EventStorage() as storage:
        for step in range(5):
            storage.iter = step
            trainer.run_step()
            if comm.is_main_process():
                losses.append(storage.latest()["total_loss"][0])
    return {
        "levels": " ".join(model.backbone.output_shape()),
        "losses": losses,
        "weights": [parameter.detach() for parameter in model.parameters()],
    }


def train_heads(args):
    """The job of one process."""
    return {name: train_head(name) for name in args.heads}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    heads = [
        name for name, (_, project, *_) in HEADS.items() if not project or is_installed(project)
    ]
    return run_in_processes(train_heads, make_args(heads=heads), tmp_path_factory.mktemp("heads"))


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_two_processes_train_each_head_of_detectron2(two_processes, name):
    first, second = two_processes
    if name not in first:
        pytest.skip(f"{HEADS[name][1]} is not installed")
    assert first[name]["levels"] == HEADS[name][3]
    assert len(first[name]["losses"]) == 5
    assert all(map(math.isfinite, first[name]["losses"]))
    torch.testing.assert_close(first[name]["weights"], second[name]["weights"], rtol=0, atol=0)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's zoo weights: loads a .pkl with Detectron2 and with qbheat_det, and compares.

Usage: detectron2_pkl.py IMAGE. Writes faster_rcnn.pkl and retinanet.pkl, with random weights.
"""

import pickle
import sys

import cv2
import torch
from detectron2 import model_zoo
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.engine import DefaultPredictor
from detectron2.modeling import build_model

import qbheat_det

CONFIGS = {
    "faster_rcnn.pkl": "COCO-Detection/faster_rcnn_R_50_FPN_3x.yaml",
    "retinanet.pkl": "COCO-Detection/retinanet_R_50_FPN_1x.yaml",
}


def get_config(name):
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file(CONFIGS[name]))
    cfg.MODEL.DEVICE = "cpu"
    cfg.INPUT.MIN_SIZE_TEST = 128
    cfg.MODEL.RETINANET.SCORE_THRESH_TEST = 0.0
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    return cfg


def write_weights(name, cfg):
    """Writes random weights as Detectron2's model zoo does. Their features are near 1."""
    torch.manual_seed(0)
    state = build_model(cfg).state_dict()
    state["backbone.bottom_up.stem.conv1.weight"] /= 1000
    arrays = {key: value.numpy() for key, value in state.items()}
    with open(name, "wb") as file:
        pickle.dump({"model": arrays, "__author__": "Detectron2 Model Zoo"}, file)
    return state


image = cv2.imread(sys.argv[1])
for name in CONFIGS:
    cfg = get_config(name)
    state = write_weights(name, cfg)

    model = build_model(cfg)
    DetectionCheckpointer(model).load(name)
    same = all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    print(f"{name}: DetectionCheckpointer loads all tensors: {same}")

    detector = qbheat_det.load(name, device="cpu")
    loaded = detector.model.state_dict()
    same = all(torch.equal(loaded[key], value) for key, value in state.items())
    print(f"{name}: qbheat_det.load loads all tensors: {same}")
    print(f"{name}: classes {detector.class_names[0]} … {detector.class_names[-1]}")

    cfg.MODEL.WEIGHTS = name
    instances = DefaultPredictor(cfg)(image)["instances"]
    boxes = instances.pred_boxes.tensor
    torch.save(torch.cat([boxes, instances.scores[:, None]], dim=1), f"{name}.boxes.pth")
    print(f"{name}: {len(instances)} boxes")

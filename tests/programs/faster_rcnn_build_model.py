# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Faster R-CNN on Mobile-Former + FPN, built by build_model(cfg) and trained by hand."""

import torch
from detectron2 import model_zoo
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage

from qbheat_det import add_qbheat_config

torch.manual_seed(0)


def get_config():
    cfg = get_cfg()
    add_qbheat_config(cfg)
    cfg.merge_from_file(model_zoo.get_config_file("COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml"))
    cfg.MODEL.BACKBONE.NAME = "build_mobile_former_fpn_backbone"
    cfg.MODEL.FPN.IN_FEATURES = ["s4", "s8", "s16"]
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 3
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 128
    cfg.MODEL.PIXEL_MEAN = [123.675, 116.28, 103.53]
    cfg.MODEL.PIXEL_STD = [58.395, 57.12, 57.375]
    cfg.MODEL.WEIGHTS = "qbheat://distill/285M"
    cfg.MODEL.DEVICE = "cpu"
    cfg.INPUT.FORMAT = "RGB"
    return cfg


def make_input(height, width):
    """An image of noise with two bright squares, in Detectron2's format."""
    boxes = torch.tensor([[10.0, 10.0, 60.0, 70.0], [70.0, 40.0, 110.0, 90.0]])
    image = torch.randint(0, 100, (3, height, width), dtype=torch.uint8)
    for x1, y1, x2, y2 in boxes.int().tolist():
        image[:, y1:y2, x1:x2] += 150
    instances = Instances((height, width))
    instances.gt_boxes = Boxes(boxes)
    instances.gt_classes = torch.tensor([0, 2])
    return {"image": image, "height": height, "width": width, "instances": instances}


cfg = get_config()
model = build_model(cfg)
DetectionCheckpointer(model).load(cfg.MODEL.WEIGHTS)
levels = {name: spec.stride for name, spec in model.backbone.output_shape().items()}
print("levels:", levels)

batch = [make_input(100, 128), make_input(128, 120)]
parameters = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
model.train()
with EventStorage():
    for step in range(8):
        losses = model(batch)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
names = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
print("without a gradient:", names)

model.eval()
with torch.no_grad():
    output = model([{"image": batch[0]["image"], "height": 200, "width": 256}])
instances = output[0]["instances"]
print(f"{len(instances)} boxes in an image of {instances.image_size}")
torch.save(model.state_dict(), "faster_rcnn.pth")

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""LazyConfig of RetinaNet on Mobile-Former, with Detectron2's FPN."""

import os

from detectron2 import model_zoo
from detectron2.config import LazyCall as L
from detectron2.data import DatasetCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.modeling.backbone.fpn import LastLevelP6P7

from qbheat_det.modeling.backbone import MobileFormer

DATA = os.path.join(os.environ["DETECTRON2_DATASETS"], "cells")
for part in ("train", "val"):
    if f"cells_{part}" not in DatasetCatalog.list():
        register_coco_instances(f"cells_{part}", {}, os.path.join(DATA, f"{part}.json"), DATA)

model = model_zoo.get_config("common/models/retinanet.py").model
dataloader = model_zoo.get_config("common/data/coco.py").dataloader
lr_multiplier = model_zoo.get_config("common/coco_schedule.py").lr_multiplier_1x
optimizer = model_zoo.get_config("common/optim.py").SGD
train = model_zoo.get_config("common/train.py").train

model.backbone.bottom_up = L(MobileFormer)(arch="285M", out_features=["s8", "s16"])
model.backbone.in_features = ["s8", "s16"]
model.backbone.top_block = L(LastLevelP6P7)(
    in_channels=256, out_channels="${..out_channels}", in_feature="p4"
)
# LastLevelP6P7 adds two levels, so there are p3, p4, p5 and p6.
model.head_in_features = ["p3", "p4", "p5", "p6"]
model.head.input_shape = model.head.input_shape[:4]
model.anchor_generator.strides = [8, 16, 32, 64]
model.anchor_generator.sizes = model.anchor_generator.sizes[:4]
model.num_classes = 3
model.test_score_thresh = 0.0
model.pixel_mean = [123.675, 116.28, 103.53]
model.pixel_std = [58.395, 57.12, 57.375]
model.input_format = "RGB"

dataloader.train.dataset.names = "cells_train"
dataloader.train.mapper.image_format = "RGB"
dataloader.train.mapper.use_instance_mask = False
dataloader.train.mapper.augmentations[0].short_edge_length = (128,)
dataloader.train.total_batch_size = 2
dataloader.train.num_workers = 0
dataloader.test.dataset.names = "cells_val"
dataloader.test.mapper.image_format = "RGB"
dataloader.test.mapper.augmentations[0].short_edge_length = 128
dataloader.test.num_workers = 0
dataloader.evaluator.dataset_name = "cells_val"

optimizer.lr = 0.001
train.max_iter = 6
train.eval_period = 6
train.log_period = 1
train.device = "cpu"
train.init_checkpoint = "qbheat://distill/285M"
train.output_dir = "output"

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MF-Dec-211 on MF-285M, twenty steps on the toy set and a CPU: proves that the job runs at all.

Twin of configs/quick_schedules/mf_detr_211_285M_toy.yaml, for Detectron2's own training script.

Command:  python <detectron2>/tools/lazyconfig_train_net.py
          --config-file configs/lazy/quick_schedules/mf_detr_211_285M_toy.py
Schedule: 20 steps x 4 images; the AP afterwards is noise.
"""

from ...common.data.coco_detr import dataloader
from ...common.models.mf_detr import model
from ...common.optim import AdamW as optimizer
from ...common.schedule import multi_step
from ...common.train import train

dataloader.train.dataset.names = "qbheat_toy_train"
dataloader.test.dataset.names = "qbheat_toy_val"
_crop, _resize, _ = dataloader.train.mapper.augmentations
_crop.resize_to, _crop.crop_range = [96, 112], [64, 112]
_resize.short_edge_length = [96, 112, 128]
dataloader.test.mapper.augmentations[0].short_edge_length = 128
dataloader.train.total_batch_size = 4
dataloader.train.num_workers = dataloader.test.num_workers = 0
model.decoder.num_classes = 6
model.decoder.num_blocks = [2, 1, 1]
optimizer.lr = 5e-5
optimizer.max_norm = 0.1
lr_multiplier = multi_step(20, [], warmup=10, factor=1.0)
train.max_iter = 20
train.eval_period = 20
train.device = "cpu"

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""RetinaNet on MF-285M, twenty steps on the toy set and a CPU: proves that the job runs at all.

Twin of configs/quick_schedules/retinanet_285M_toy.yaml, for Detectron2's own training script.

Command:  python <detectron2>/tools/lazyconfig_train_net.py
          --config-file configs/lazy/quick_schedules/retinanet_285M_toy.py
Schedule: 20 steps x 4 images; the AP afterwards is noise.
"""

from ...common.data.coco import dataloader
from ...common.models.retinanet import model
from ...common.optim import SGD as optimizer
from ...common.schedule import multi_step
from ...common.train import train

dataloader.train.dataset.names = "qbheat_toy_train"
dataloader.test.dataset.names = "qbheat_toy_val"
dataloader.train.mapper.augmentations[0].short_edge_length = [128]
dataloader.test.mapper.augmentations[0].short_edge_length = 128
dataloader.train.total_batch_size = 4
dataloader.train.num_workers = dataloader.test.num_workers = 0
model.num_classes = 6
optimizer.lr = 0.0025
lr_multiplier = multi_step(20, [])
train.max_iter = 20
train.eval_period = 20
train.device = "cpu"

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""QB-Heat on MF-285M, twenty steps on the toy set and a CPU: proves that the job runs at all.

Twin of configs/quick_schedules/qb_heat_285M_toy.yaml, for Detectron2's own training script.

Command:  python <detectron2>/tools/lazyconfig_train_net.py
          --config-file configs/lazy/quick_schedules/qb_heat_285M_toy.py
Schedule: 20 steps x 8 images; the loss afterwards is noise.
"""

from ...common.data.pretraining import dataloader
from ...common.models.qb_heat import model
from ...common.optim import AdamW as optimizer
from ...common.schedule import cosine
from ...common.train import train

dataloader.train.dataset.names = "qbheat_toy_train_images"
dataloader.train.mapper.size = 128
dataloader.train.total_batch_size = 8
dataloader.train.num_workers = 0
model.predictor.dim = model.decoder.dim = 128
model.decoder.grid_size = 8
model.decoder.depth = 2
model.decoder.num_heads = 4
optimizer.lr = 1.5e-4 * 8 / 256
optimizer.betas = [0.9, 0.95]
optimizer.weight_decay = 0.1
lr_multiplier = cosine(20, warmup=5)
train.max_iter = 20
train.eval_period = 0
train.device = "cpu"

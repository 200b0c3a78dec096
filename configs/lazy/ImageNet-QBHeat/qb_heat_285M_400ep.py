# Copyright (c) qbheat_det contributors. Apache-2.0.
"""QB-Heat on MF-285M, 400 epochs, in float32 or float16 (the script knows no bfloat16).

Twin of configs/ImageNet-QBHeat/qb_heat_285M_400ep.yaml, for Detectron2's own training script.

Command:  python <detectron2>/tools/lazyconfig_train_net.py
          --config-file configs/lazy/ImageNet-QBHeat/qb_heat_285M_400ep.py
          --num-gpus 8 train.amp.enabled=True
Schedule: 400 epochs x 1,281,167 images / 1024 = 500,456 steps; cosine after 10 epochs of warm-up.
"""

from ...common.data.pretraining import dataloader
from ...common.models.qb_heat import model
from ...common.optim import AdamW as optimizer
from ...common.schedule import cosine
from ...common.train import train

optimizer.lr = 6e-4
optimizer.betas = [0.9, 0.95]
optimizer.weight_decay = 0.1
lr_multiplier = cosine(500456, warmup=12512)
train.max_iter = 500456
train.checkpointer.period = 6256
train.eval_period = 0

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MF-Dec-211 on a frozen MF-285M: detection decoder probing.

Twin of configs/coco/mf_detr_211_285M_probe.yaml, for Detectron2's own training script.

Command:  python <detectron2>/tools/lazyconfig_train_net.py
          --config-file configs/lazy/coco/mf_detr_211_285M_probe.py --num-gpus 8
          train.init_checkpoint=<pre-trained MF-285M: a .pth or qbheat://NAME>
Schedule: 500 epochs x 118,287 images / 16 = 3,696,469 steps; rate / 10 after 400 (2,957,175).
"""

from ...common.data.coco_detr import dataloader
from ...common.models.mf_detr import model
from ...common.optim import AdamW as optimizer
from ...common.schedule import multi_step
from ...common.train import train

model.backbone.freeze_at = 5
model.decoder.num_blocks = [2, 1, 1]
optimizer.max_norm = 0.1
lr_multiplier = multi_step(3696469, [2957175], warmup=10, factor=1.0)
train.max_iter = 3696469
train.checkpointer.period = 36965
train.eval_period = 73930

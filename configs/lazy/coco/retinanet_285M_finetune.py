# Copyright (c) qbheat_det contributors. Apache-2.0.
"""RetinaNet and MF-285M trained together.

Twin of configs/coco/retinanet_285M_finetune.yaml, for Detectron2's own training script.

Command:  python <detectron2>/tools/lazyconfig_train_net.py
          --config-file configs/lazy/coco/retinanet_285M_finetune.py --num-gpus 8
          train.init_checkpoint=<pre-trained MF-285M: a .pth or qbheat://NAME>
Schedule: 12 epochs x 117,266 images with boxes / 16 = 87,950 steps; rate / 10
          after 8 (58,633) and 11 (80,621).
"""

from ...common.data.coco import dataloader
from ...common.models.retinanet import model
from ...common.optim import SGD as optimizer
from ...common.schedule import multi_step
from ...common.train import train

model.backbone.bottom_up.norm = "FrozenBN"
optimizer.lr = 0.01
lr_multiplier = multi_step(87950, [58633, 80621])
train.max_iter = 87950
train.checkpointer.period = train.eval_period = 7330

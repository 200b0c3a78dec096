# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Optimizers over the groups of ``qbheat_det.solver``: tokens, norms and biases are not decayed.

The training script puts the model at ``optimizer.params.model``.
"""

import torch
from detectron2.config import LazyCall as L

from qbheat_det.solver import adamw, parameter_groups

_groups = {
    "lr": "${..lr}",
    "weight_decay": "${..weight_decay}",
    "backbone_multiplier": 1.0,
    "weight_decay_norm": 0.0,
    "weight_decay_bias": 0.0,
}
SGD = L(torch.optim.SGD)(
    params=L(parameter_groups)(**_groups), lr=0.02, momentum=0.9, weight_decay=1e-4
)
AdamW = L(adamw)(
    params=L(parameter_groups)(**_groups),
    lr=1e-4,
    betas=[0.9, 0.999],
    weight_decay=1e-4,
    max_norm=0.0,  # above 0 it clips the norm of all gradients together
)

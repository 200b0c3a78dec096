# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One step of Wasserstein dependency on eight images, in one of several processes or the only one.

What is drawn is given: by default each process draws for its own images.
"""

import argparse
from typing import Any

import torch
from detectron2.modeling import build_model
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from qbheat_det.engine.launch import distribute
from qbheat_det.engine.step import StepTrainer
from qbheat_det.modeling.pretrain.wasserstein import AreaPairs, DependencyDraw
from tests.modeling.tiny_pretraining import make_tiny_config

NUM_IMAGES = 8
FORMS = ("dual", "contrastive")
NORMS = ("fixed", "BN", "naiveSyncBN_N")
"""Statistics of BatchNorm: running ones, those of each process, those of all."""


def run_step(form: str, norm: str = "fixed") -> dict[str, Tensor]:
    """Returns the gradients, and the mean loss under "total_loss"."""
    cfg = make_tiny_config("WassersteinDependency")
    cfg.MODEL.MOBILE_FORMER.NORM = "BN" if norm == "fixed" else norm
    keys = cfg.MODEL.WASSERSTEIN
    keys.FORM, keys.RADIUS, keys.HIDDEN_DIM, keys.DIM, keys.CRITIC_DIM = form, 3.0, 32, 8, 16
    cfg.SOLVER.IMS_PER_BATCH = NUM_IMAGES
    torch.manual_seed(0)
    model: Any = build_model(cfg)
    for parameter in model.critic.parameters():
        nn.init.normal_(parameter, std=0.3)  # steep enough for a penalty
    share = NUM_IMAGES // comm.get_world_size()
    mine = slice(comm.get_rank() * share, (comm.get_rank() + 1) * share)
    images = torch.randint(256, (NUM_IMAGES, 3, 64, 64), dtype=torch.uint8)
    first = torch.arange(NUM_IMAGES) % 4
    second = (first + 1 + torch.arange(NUM_IMAGES) % 3) % 4
    mixing = torch.rand(NUM_IMAGES)
    areas = AreaPairs(first[mine], second[mine])
    model.draw = lambda num_images: DependencyDraw(areas, mixing[mine])
    batch = [{"image": image} for image in images[mine]]
    trainer = StepTrainer(
        distribute(model) if comm.get_world_size() > 1 else model,
        [batch],
        torch.optim.SGD(model.parameters(), lr=0.0),
        batch_size=NUM_IMAGES,
    )
    for module in model.modules():
        if norm == "fixed" and isinstance(module, nn.BatchNorm2d):
            module.eval()
    with EventStorage() as storage:
        trainer._data_loader_iter_obj = iter([batch])
        trainer.iter = 0
        trainer.run_step()
        storage.step()
        total = storage.history("total_loss").latest()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {**gradients, "total_loss": torch.tensor(total)}


def run_forms(args: argparse.Namespace) -> dict[tuple[str, str], dict[str, Tensor]]:
    """The job of one process."""
    return {(form, norm): run_step(form, norm) for form in FORMS for norm in NORMS}

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A step of small reconstructing models, as one of several processes or as the only one."""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.modeling import build_model
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qbheat_det.data import cut
from qbheat_det.engine.launch import distribute
from qbheat_det.engine.step import StepTrainer
from qbheat_det.modeling.pretrain import QUADRANTS
from tests.modeling.tiny_pretraining import make_tiny_config


@dataclass(frozen=True)
class Case:
    """An objective, the number of images of its step, and the micro-batches of each process."""

    meta_arch: str
    num_images: int = 4
    accumulate: int = 1


class WithGivenMasks(nn.Module):
    """A model whose images bring what is visible of them, which each process else draws."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batched_inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        if hasattr(self.model, "choose_quarters"):
            return self.model(batched_inputs, [entry["place"] for entry in batched_inputs])
        return self.model(batched_inputs, torch.stack([e["visible"] for e in batched_inputs]))


def make_image(index: int) -> dict[str, Any]:
    """Returns what a mapper gives for an image, and what is visible of it."""
    generator = torch.Generator().manual_seed(index)
    image = torch.randint(256, (3, 64, 64), generator=generator, dtype=torch.uint8)
    visible = (torch.rand(16, generator=generator).argsort() < 4).view(4, 4)
    return {"image": image, "visible": visible, "place": QUADRANTS[index % len(QUADRANTS)]}


def run_case(case: Case) -> dict[str, Tensor]:
    """Returns the gradients of a step, and its mean loss under "total_loss"."""
    torch.manual_seed(0)
    model = build_model(make_tiny_config(case.meta_arch))
    for name, parameter in model.named_parameters():
        if name.startswith("predictor."):  # zero at first
            nn.init.normal_(parameter, std=0.1)
    for module in model.modules():
        if isinstance(module, _BatchNorm):  # else early gradients vanish in so small a network
            nn.init.uniform_(module.weight, 0.5, 1.5)
    world_size, rank = comm.get_world_size(), comm.get_rank()
    images = [make_image(index) for index in range(case.num_images)]
    whole = WithGivenMasks(model)
    trainer = StepTrainer(
        distribute(whole) if world_size > 1 else whole,
        [cut(images, world_size)[rank]],
        torch.optim.SGD(model.parameters(), lr=0.0),
        batch_size=case.num_images,
        accumulate=case.accumulate,
    )
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()  # whose statistics else are those of a process
    with EventStorage() as storage:
        trainer.iter = 0
        trainer.run_step()
        total = storage.history("total_loss").latest()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {**gradients, "total_loss": torch.tensor(total)}


def run_cases(args: argparse.Namespace) -> dict[str, dict[str, Tensor]]:
    """The job of one process: ``args.cases`` by name."""
    return {name: run_case(case) for name, case in args.cases.items()}

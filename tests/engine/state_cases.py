# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What one of several processes does besides steps: a failing loss, and averages of tensors."""

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import Any

import torch
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.engine.hooks import average_over_processes
from qbheat_det.engine.launch import distribute
from qbheat_det.engine.step import StepTrainer

EQUAL = torch.arange(1, 1000) / 7  # sums of three of which do not divide back


class OneLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {"loss": self.weight.sum() * batch[0]["value"]}


def fail_and_average(args: argparse.Namespace) -> dict[str, Any]:
    """The job of one process: a loss that is not a number on the last, then two averages."""
    rank = comm.get_rank()

    def write_slowly(*_: Any) -> None:
        time.sleep(0.5)
        Path(args.file).write_text(str(rank))
        raise UserError(f"written by {rank}")

    model = OneLoss()
    trainer = StepTrainer(
        distribute(model),
        itertools.repeat([{"value": math.nan if rank == 2 else 1.0}]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=3,
        on_failure=write_slowly,
    )
    said = ""
    with EventStorage():
        try:
            trainer.run_step()
        except UserError as error:
            said = str(error)
    frozen, moving = EQUAL.clone(), torch.tensor([3.0 * rank, 1.0])
    for _ in range(3):
        average_over_processes(frozen)
    average_over_processes(moving)
    return {"said": said, "frozen": frozen, "moving": moving, "weight": model.weight.detach()}

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What three processes do together besides gradients: fail, and average their statistics."""

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.engine.hooks import average_over_processes
from qbheat_det.engine.launch import distribute
from qbheat_det.engine.step import StepTrainer

from .processes import make_args, run_in_processes

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
        time.sleep(1)
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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("state")
    args = make_args(file=str(folder / "failure"))
    found = run_in_processes(fail_and_average, args, folder, world_size=3)
    assert (folder / "failure").read_text() == "2"
    return found


def test_all_processes_wait_for_the_failing_one_and_say_what_it_says(
    results: list[dict[str, Any]],
) -> None:
    assert [each["said"] for each in results] == ["written by 2"] * 3
    for each in results:
        torch.testing.assert_close(each["weight"], torch.ones(1))


def test_statistics_become_their_mean_and_equal_ones_keep_their_bits(
    results: list[dict[str, Any]],
) -> None:
    for each in results:
        torch.testing.assert_close(each["moving"], torch.tensor([3.0, 1.0]))
        torch.testing.assert_close(each["frozen"], EQUAL, rtol=0, atol=0)
    assert not torch.equal(sum([EQUAL, EQUAL], EQUAL.clone()) / 3, EQUAL)

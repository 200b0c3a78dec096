# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The randomness of a step: a function of the run's seed, the step and the process alone."""

import random

import numpy as np
import pytest
import torch

from qbheat_det.engine.seeding import seed_step


def _draw() -> torch.Tensor:
    values = [random.random(), *np.random.rand(2), *torch.rand(3, dtype=torch.float64).tolist()]
    return torch.tensor(values, dtype=torch.float64)


def _numbers(seed: int, iteration: int, rank: int) -> torch.Tensor:
    seed_step(seed, iteration, rank)
    return _draw()


def test_the_same_place_gives_the_same_numbers_whatever_was_drawn_before() -> None:
    first = _numbers(7, 100, 1)
    _draw()
    torch.testing.assert_close(_numbers(7, 100, 1), first, rtol=0, atol=0)


def test_each_of_seed_step_and_process_changes_all_numbers() -> None:
    places = [(7, 100, 1), (8, 100, 1), (7, 101, 1), (7, 100, 0), (7, 1, 100), (0, 0, 0)]
    drawn = torch.stack([_numbers(*place) for place in places])
    for column in drawn.T:
        assert len(set(column.tolist())) == len(places)


@pytest.mark.gpu
def test_the_gpu_is_seeded_too_and_draws_other_numbers_than_the_cpu() -> None:
    drawn = []
    for _ in range(2):
        seed_step(7, 100, 1)
        drawn.append(torch.stack([torch.rand(8, device="cuda").cpu(), torch.rand(8)]))
    torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=0)
    assert not torch.equal(drawn[0][0], drawn[0][1])

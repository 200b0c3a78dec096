# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The randomness of one training step, which no checkpoint has to hold."""

import numpy as np
import torch

from qbheat_det.data import STEP, seed_place

_DEVICE = 3  # last number of the place, so that the GPU does not repeat the CPU's numbers


def seed_step(seed: int, iteration: int, rank: int) -> None:
    """Seeds Python, NumPy and torch, on the CPU and on this process's GPU, for one step.

    Equal arguments give equal dropout. Takes tens of microseconds and waits for no device.

    Args:
        seed: of the run, 0 or more.
        iteration: number of the step, from 0.
        rank: of this process.
    """
    seed_place(seed, STEP, iteration, rank)
    if torch.cuda.is_available():
        place = np.random.SeedSequence((seed, STEP, iteration, rank, _DEVICE))
        torch.cuda.manual_seed(int(place.generate_state(1, np.uint64)[0] >> np.uint64(1)))

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Randomness without a state: everything random is a function of the run's seed and a place.

A run that is resumed then needs no saved generator. A step is seeded by its number and the
process, an augmented image by its position in the stream of images, a fixed view of an image by
the image's index and its own number.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

# First number after the seed, so that no image shares the randomness of a step or a fixed view.
IMAGE, STEP, VIEW = 1, 2, 3


def seed_place(*place: int) -> None:
    """Seeds the generators of Python, NumPy and torch on the CPU from non-negative integers.

    Equal integers give equal randomness, others an independent one; trailing zeros do not count.
    """
    words = np.random.SeedSequence(place).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    # Not torch.manual_seed, which would touch the GPUs too.
    torch.default_generator.manual_seed(int(words[2]) << 32 | int(words[3]))


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Leaves the CPU's generators as they were."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts a model into eval mode without gradients.

    Afterwards the mode of each of its modules and all random generators are as before.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters()}
    gpus = [device.index for device in devices if device.type == "cuda"]
    try:
        model.eval()
        with preserved_randomness(), torch.random.fork_rng(gpus), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training

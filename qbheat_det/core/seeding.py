# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Seeds of steps, images and views, as functions of the run's seed and their position.

A resumed run needs no saved generators. A step is seeded by its number and the process, an
augmented image by its position in the stream of images, and a fixed view by the image's index and
the view's number.
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
    """Seeds the CPU's generators of Python, NumPy and torch from non-negative integers.

    Different integers give independent numbers; trailing zeros do not count.
    """
    words = np.random.SeedSequence(place).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    # Not torch.manual_seed, which would touch the GPUs too.
    torch.default_generator.manual_seed(int(words[2]) << 32 | int(words[3]))


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Restores the CPU's generators of Python, NumPy and torch at the end."""
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

    Restores the mode of each module and all random generators at the end.
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

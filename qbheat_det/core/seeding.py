# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Seeds of random generators, computed from the seed of a run and a position in it.

The seed of a training step depends on the number of the step and the rank of the process. The seed
of an augmented image depends on its position in the stream of images. The seed of a fixed view
depends on the name of the image and the number of the view. A resumed run computes the same seeds
again, so checkpoints need not store the states of random generators.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

# The second integer of each seed, so that images, steps and fixed views never have equal seeds.
IMAGE = 1
STEP = 2
VIEW = 3
_CUDA = 3  # appended to the seed of a step, so that GPU and CPU draw different numbers


def seed_place(*place: int) -> None:
    """Seeds the CPU generators of Python, NumPy and torch by a sequence of non-negative integers.

    Different sequences give independent random numbers. Trailing zeros make no difference: (1, 2)
    and (1, 2, 0) give the same numbers.
    """
    words = np.random.SeedSequence(place).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    # torch.manual_seed would also seed the GPUs.
    torch.default_generator.manual_seed(int(words[2]) << 32 | int(words[3]))


def seed_step(seed: int, iteration: int, rank: int) -> None:
    """Seeds Python, NumPy and torch, on the CPU and on this process's GPU, for one step.

    Equal arguments give equal random numbers, such as those of dropout.

    Args:
        seed: seed of the run.
        iteration: number of the step.
        rank: rank of the process.
    """
    seed_place(seed, STEP, iteration, rank)
    if torch.cuda.is_available():
        sequence = np.random.SeedSequence((seed, STEP, iteration, rank, _CUDA))
        gpu_seed = sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)  # 63 bits
        torch.cuda.manual_seed(int(gpu_seed))


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Context that restores the states of the CPU generators of Python, NumPy and torch on exit."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in eval mode, and gradients are disabled.

    On exit, the training mode of each module and the states of the random generators are restored.
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

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Registers the second device, in the processes that were started for it alone.

A process has one second accelerator, for good: PyTorch then asks it for random states, streams and
memory wherever it asks CUDA, in tests that have nothing to do with it too.
"""

import os

import torch
from torch.utils import backend_registration

from tests.engine.conftest import _forget_runs

__all__ = ["_forget_runs"]

# Beside a GPU, PyTorch has no second accelerator; before 2.10, none in Python.
if (
    "TEST_DEVICE" not in os.environ
    or torch.cuda.is_available()
    or "_setup_privateuseone_for_python_backend" not in vars(backend_registration)
):
    collect_ignore = ["test_second_device.py"]
else:
    from .second_device import install

    install()

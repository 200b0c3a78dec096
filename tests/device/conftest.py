# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The second device has to be there before the first backward pass of the process."""

import torch
from torch.utils import backend_registration

from tests.engine.conftest import _forget_runs

__all__ = ["_forget_runs"]

# Beside a GPU, PyTorch has no second accelerator; before 2.10, none in Python.
if torch.cuda.is_available() or "_setup_privateuseone_for_python_backend" not in vars(
    backend_registration
):
    collect_ignore = ["test_second_device.py"]
else:
    from .second_device import install

    install()

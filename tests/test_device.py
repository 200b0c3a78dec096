# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The tests of the second device, in a process of their own: see ``tests/device/conftest.py``."""

import os
import subprocess
import sys

import pytest

from .import_graph import ROOT

NO_TESTS = 5  # pytest's exit status


def test_models_run_on_a_device_that_does_not_mix_with_the_cpu():
    command = [sys.executable, "-m", "pytest", "tests/device", "-q", "-m", "not slow"]
    env = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    env |= {"TEST_DEVICE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if run.returncode == NO_TESTS:
        pytest.skip("beside a GPU, or with PyTorch before 2.10, there is no second device")
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiny data, and a clean slate between runs in one process."""

import pytest

from tests.toy_set import draw_toy_set

from . import tiny_training
from .tiny_training import forget_runs


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """Folder of twelve annotated images."""
    return draw_toy_set(tmp_path_factory.mktemp("tiny"), 12)


@pytest.fixture(scope="session")
def few_data(tmp_path_factory):
    """Folder of four annotated images."""
    return draw_toy_set(tmp_path_factory.mktemp("few"), 4)


@pytest.fixture(scope="session")
def whole_run(tiny_data, tmp_path_factory):
    """Folder of an unbroken run of the tiny RetinaNet, to compare broken ones with."""
    folder = tmp_path_factory.mktemp("whole")
    tiny_training.train(folder, tiny_data, {})
    return folder


@pytest.fixture
def train_afresh(tiny_data):
    """Trains as in a new process: ``(output_dir, overrides, *flags) -> results``."""
    return lambda folder, opts, *flags: tiny_training.train(folder, tiny_data, opts, *flags)


@pytest.fixture(autouse=True)
def _forget_runs():
    yield
    forget_runs()

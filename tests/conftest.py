# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What every test shares: fixed seeds, few threads, GPU tests skipped where there is no GPU."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

# What the package caches is below the checkout, and not in a home folder. So a clean checkout makes
# the files of the model zoo anew, as a new user does.
_CACHE = Path(__file__).resolve().parents[1] / "output" / "test_cache"
os.environ.setdefault("QBHEAT_CACHE", str(_CACHE))
os.environ.setdefault("FVCORE_CACHE", str(_CACHE / "zoo"))

# Workers share the cores; more threads than cores make convolutions several times slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Skips tests marked ``gpu`` where torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords also have the names of folders
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _memory(monkeypatch):
    """Leaves malloc alone: what trains sets it for a whole process, and tests share one."""
    from qbheat_det.engine import hooks

    monkeypatch.setattr(hooks, "keep_freed_memory", lambda: True)


@pytest.fixture(autouse=True)
def _sets():
    """Forgets the data sets that a test registers."""
    from detectron2.data import DatasetCatalog, MetadataCatalog

    before = set(DatasetCatalog.list())
    yield
    for name in set(DatasetCatalog.list()) - before:
        DatasetCatalog.remove(name)
        MetadataCatalog.pop(name, None)

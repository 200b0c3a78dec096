# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Data sets that a test registers are forgotten after it."""

from collections.abc import Iterator

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog


@pytest.fixture(autouse=True)
def _forget_new_sets() -> Iterator[None]:
    before = set(DatasetCatalog.list())
    yield
    for name in set(DatasetCatalog.list()) - before:
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)

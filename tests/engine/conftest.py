# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiny data, and a clean slate between runs in one process."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils import events

from qbheat_det.engine.data_sources import CUSTOM_TRAIN, CUSTOM_VAL

from . import tiny_training

TrainAfresh = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of twelve annotated images."""
    return tiny_training.make_data(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def train_afresh(tiny_data: Path) -> Iterator[TrainAfresh]:
    """Trains as in a new process: ``(output_dir, overrides, *flags, data=…) -> results``."""

    def go(
        output_dir: Path, opts: dict[str, str], *flags: str, data: Path = tiny_data
    ) -> dict[str, Any]:
        forget_runs()
        return tiny_training.train(output_dir, data, opts, *flags)

    yield go
    forget_runs()


def forget_runs(*datasets: str) -> None:
    """Removes what a run leaves in Detectron2's global state, and the named datasets."""
    for name in (CUSTOM_TRAIN, CUSTOM_VAL, *datasets):
        if name in DatasetCatalog:
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)
    events._CURRENT_STORAGE_STACK.clear()
    for logger in map(logging.getLogger, ("detectron2", "fvcore", "qbheat_det")):
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.propagate = True

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of cached features: what is compared, by what bound, and that both do the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog

from benchmarks.cached_cases import CASES, make_config, shrunk
from benchmarks.cached_training import (
    measure_case,
)
from qbheat_det.data import build_mapper


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_a_case_shows_images_of_its_size_once_augmented(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    cfg = make_config(case, tmp_path, num_images=1)
    (record,) = DatasetCatalog.get(cfg.DATASETS.TRAIN[0])
    entry = build_mapper(cfg, is_train=True)(record)
    assert tuple(entry["image"].shape) == (3, *case.size)
    assert ("instances" in entry) == case.has_boxes
    assert cfg.MODEL.BACKBONE.FREEZE_AT == 5


@pytest.mark.slow
def test_both_train_the_same_steps() -> None:
    measured = measure_case(shrunk(CASES["285m_211"]), rounds=1, dtype="float32")
    online, cached = measured.online.losses, measured.cached.losses
    # The cache was made in another batch, whose convolutions round otherwise.
    torch.testing.assert_close(cached, online, rtol=1e-5, atol=0.0)
    assert len(set(online)) == len(online) == 2

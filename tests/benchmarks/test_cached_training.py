# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of cached features: what is compared, by what bound, and that both do the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog

from benchmarks import cached_training
from benchmarks.cached_cases import CASES, make_config, shrunk
from benchmarks.cached_training import (
    Figures,
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


@pytest.fixture(scope="module")
def measured() -> dict[str, Figures]:
    """Figures of the cases of a quick run by their titles, from caches of full precision."""
    cases = [shrunk(CASES[name]) for name in cached_training.QUICK]
    return {case.title: measure_case(case, rounds=1, dtype="float32") for case in cases}


@pytest.mark.slow
def test_both_train_the_same_steps(measured: dict[str, Figures]) -> None:
    detector = measured[CASES["285m_211"].title]
    online, cached = detector.online.losses, detector.cached.losses
    # The cache was made in another batch, whose convolutions round otherwise.
    torch.testing.assert_close(cached, online, rtol=1e-5, atol=0.0)
    assert len(set(online)) == len(online) == 2


@pytest.mark.slow
def test_a_quick_run_measures_a_detector_and_a_classifier(
    measured: dict[str, Figures],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cached_training, "measure_case", lambda case, **_: measured[case.title])
    names = {row.name for row in cached_training.run(quick=True, threads=1)}
    assert names == {
        f"cached_training/{case}_vs_{peer}"
        for case in ("285m_211", "285m_linear")
        for peer in ("online", "online_without_loading")
    }
    assert "MF-285M + MF-Dec-211" in capsys.readouterr().out

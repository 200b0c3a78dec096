# Copyright (c) qbheat_det contributors. Apache-2.0.
"""benchmarks/run.py, and that every detector it measures runs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import run, training_speed
from benchmarks.cached_cases import CASES, shrunk
from benchmarks.cached_training import measure_case
from benchmarks.detectors import DETECTORS, random_images
from benchmarks.forms import EAGER, Forwards
from benchmarks.timing import ENVIRONMENTS, Result


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", DETECTORS)
def test_every_detector_runs_on_a_small_image(name: str) -> None:
    if "detr_r" in name:
        pytest.importorskip("transformers")
    detector = DETECTORS[name]
    with torch.inference_mode():
        assert detector.call(detector.load()(), random_images(160, 160)) is not None


def test_only_runs_what_it_names_and_quick_figures_have_their_own_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = Result.lower_is_better("memory/a_vs_b", 1.0, 2.0, "MiB")
    monkeypatch.setattr(training_speed, "run", lambda quick, threads: [row])
    run.main(["--only", "training_speed", "--quick", "--threads", "1", "--output", str(tmp_path)])
    folder = tmp_path / "quick"
    assert {*tmp_path.rglob("*.json")} == {folder / "training_speed.json", folder / ENVIRONMENTS}
    assert json.loads((folder / "training_speed.json").read_text())[0]["ratio"] == 2.0
    assert "1 threads" in json.loads((folder / ENVIRONMENTS).read_text())["training_speed"]


@pytest.mark.slow
def test_a_quick_run_measures_the_speed_of_both_trees() -> None:
    rows = training_speed.run(quick=True, cases=["mf_detr_285m_211"], threads=1)
    assert [row.name for row in rows] == ["training_speed/mf_detr_285m_211_after_vs_before"]


@pytest.mark.slow
def test_processes_run_detectors_and_one_that_cannot_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    contenders = [("285m_211", EAGER), ("no detector", EAGER)]
    with Forwards(contenders, 64, 64, threads=1, quick=True) as calls:
        assert list(calls) == contenders[:1]
        assert 0 < calls[contenders[0]]() < 60
    assert "no detector, eager is left out: KeyError: 'no detector'" in capsys.readouterr().out


@pytest.mark.slow
def test_with_cached_features_training_takes_the_same_steps() -> None:
    measured = measure_case(shrunk(CASES["285m_211"]), rounds=1, dtype="float32")
    online, cached = measured.online.losses, measured.cached.losses
    # The cache was made in another batch, whose convolutions round otherwise.
    torch.testing.assert_close(cached, online, rtol=1e-5, atol=0.0)
    assert len(set(online)) == len(online) == 2

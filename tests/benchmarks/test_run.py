# Copyright (c) qbheat_det contributors. Apache-2.0.
"""benchmarks/run.py, and that every detector it measures runs."""

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import latency, run, training_speed
from benchmarks.detectors import DETECTORS, OURS, PEERS, random_images
from benchmarks.timing import ENVIRONMENTS, Result

PAIRS = {f"{ours}_eager_vs_{peer}" for ours in OURS for peer in PEERS}


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


def test_latency_puts_ours_plain_and_deployed_beside_each_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {"285m_211": 1.0, "3.7g_522": 2.0, "detr_r50": 3.0, "retinanet_r50": 4.0}
    faster = {"eager": 1.0, "compiled": 2.0, "deploy": 4.0}
    faster |= {"compiled_bf16": 4.0, "deploy_bf16": 6.0}

    def forwards(contenders: list[tuple[str, str]], *_: object, **__: object) -> object:
        calls = {
            (name, form): partial(float, seconds.get(name, 6.0) / faster[form])
            for name, form in contenders
            if (name, form) != ("rt_detr_r18", "eager")  # one that is left out
        }
        return contextlib.nullcontext(calls)

    monkeypatch.setattr(latency, "Forwards", forwards)
    ratios = {row.name: row.ratio for row in latency.run(quick=True)}
    assert {f"latency/{pair}" for pair in PAIRS} <= set(ratios)
    assert ratios["latency/285m_211_eager_vs_detr_r50"] == 3.0
    assert ratios["latency/285m_211_deploy_vs_detr_r50_compiled"] == 6.0
    assert ratios["latency/3.7g_522_deploy_vs_3.7g_522_eager"] == 4.0
    assert ratios["latency/285m_211_deploy_bf16_vs_detr_r50_compiled_bf16"] == 4.5
    assert "latency/285m_211_640_deploy_vs_rt_detr_r18" not in ratios


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

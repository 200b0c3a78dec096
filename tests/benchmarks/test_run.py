# Copyright (c) qbheat_det contributors. Apache-2.0.
"""benchmarks/run.py, and that every detector it measures runs."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import latency, memory, run
from benchmarks.detectors import DETECTORS, OURS, PEERS, Forward, random_image
from benchmarks.timing import Result, Sample

PAIRS = {f"{ours}_eager_vs_{peer}" for ours in OURS for peer in PEERS}


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", DETECTORS)
def test_every_detector_runs_on_a_small_image(name: str) -> None:
    if name == "detr_r50":
        pytest.importorskip("transformers")
    forward = DETECTORS[name].load()()
    with torch.inference_mode():
        assert forward(random_image(64, 96)) is not None


def test_latency_compares_each_of_ours_with_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = dict(zip((*OURS, *PEERS), (0.5, 2.0, 1.0, 4.0), strict=True))
    monkeypatch.setattr(
        latency,
        "time_interleaved",
        lambda calls, rounds: {name: Sample.of([seconds[name]]) for name in calls},
    )
    monkeypatch.setattr(latency, "DETECTORS", dict.fromkeys(DETECTORS, _Nothing()))
    rows = {row.name: row for row in latency.run(quick=True)}
    assert set(rows) == {f"latency/{pair}" for pair in PAIRS}
    assert rows["latency/285m_211_eager_vs_detr_r50"].ratio == 2.0
    assert rows["latency/3.7g_522_eager_vs_retinanet_r50"].ratio == 2.0


class _Nothing:
    title = "nothing"

    def load(self) -> Callable[[], Forward]:
        return lambda: lambda image: image


def test_memory_compares_the_same_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        memory,
        "peak_memory_in_turns",
        lambda commands, rounds: {name: Sample.of([100.0]) for name in commands},
    )
    assert {row.name for row in memory.run(quick=True)} == {f"memory/{pair}" for pair in PAIRS}


def test_only_runs_what_it_names_and_quick_figures_have_their_own_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = Result.lower_is_better("memory/a_vs_b", 1.0, 2.0, "MiB")
    monkeypatch.setattr(memory, "run", lambda quick, threads: [row])
    run.main(["--only", "memory", "--quick", "--output", str(tmp_path)])
    (written,) = tmp_path.rglob("*.json")
    assert written == tmp_path / "quick" / "memory.json"
    assert json.loads(written.read_text())[0]["ratio"] == 2.0


def test_an_unknown_benchmark_ends_with_the_names_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run.main(["--only", "speed"])
    assert exit_info.value.code == 2
    assert "no benchmark named 'speed'; there are latency, memory" in capsys.readouterr().err


def test_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    run.main(["--list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(
        run.BENCHMARKS
    )


def test_a_missing_library_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> list[Result]:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(latency, "run", fail)
    with pytest.raises(SystemExit):
        run.main(["--only", "latency", "--output", str(tmp_path)])
    assert "needs transformers; install the extra 'bench'" in capsys.readouterr().err

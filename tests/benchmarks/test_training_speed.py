# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Steps before and after: fair turns, processes of two trees, sentences where one cannot be had."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training_speed, training_worker
from benchmarks.timing import ROOT
from benchmarks.training_speed import (
    BEFORE,
    Turns,
    export_tree,
    take_turns,
)
from benchmarks.training_worker import serve
from benchmarks.workers import LeftOut, Worker


def test_contenders_take_turns_and_each_goes_first_as_often() -> None:
    order: list[str] = []

    def worker(name: str, seconds: float) -> Any:
        def call(steps: int) -> dict[str, Any]:
            order.append(f"{name}{steps}")
            return {"seconds": seconds, "loss": float(len(order)), "peak": 100.0}

        return call

    turns = take_turns({"before": worker("b", 4.0), "after": worker("a", 2.0)}, rounds=2, warm_up=1)
    assert order == ["b1", "b1", "a1", "a1", "a1", "b1", "b1", "a1"]
    assert turns == {
        "before": Turns([0.25, 0.25], 1.0, 100.0),
        "after": Turns([0.5, 0.5], 3.0, 100.0),
    }


def test_a_worker_answers_each_turn_with_the_time_less_the_waiting() -> None:
    now = [0.0]

    def step() -> tuple[float, float]:
        now[0] += 3.0
        return 1.0, now[0]

    answers: list[dict[str, Any]] = []
    serve(step, ["2\n", "1\n"], answers.append, lambda: now[0])
    assert [answer["seconds"] for answer in answers] == [4.0, 2.0]
    assert [answer["loss"] for answer in answers] == [6.0, 9.0]


def test_a_worker_that_says_an_error_or_ends_is_left_out() -> None:
    says = "import json; print(json.dumps({'error': 'KeyError: no such key\\nsecond line'}))"
    for code, sentence in ((says, "KeyError: no such key$"), ("pass", "its process ended")):
        worker = Worker(["-c", code])
        with pytest.raises(LeftOut, match=sentence):
            worker.wait()
        worker.close()


def test_without_git_or_the_commit_a_sentence_and_no_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training_speed, "BEFORE", "0" * 40)
    assert training_speed.run(quick=True, cases=["qb_heat_285m"], threads=1) == []
    assert "nothing to compare with: " in capsys.readouterr().out

    def no_git(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(training_speed.subprocess, "run", no_git)
    with pytest.raises(LeftOut, match="there is no git here"):
        export_tree(BEFORE, tmp_path)


def test_the_copy_is_the_package_without_weights(tmp_path: Path) -> None:
    known = subprocess.run(["git", "cat-file", "-e", BEFORE], cwd=ROOT, capture_output=True)
    if known.returncode:
        pytest.skip("git's history here does not reach back")
    tree = export_tree(BEFORE, tmp_path / "before")
    assert {path.name for path in tree.iterdir()} == {"qbheat_det", "configs"}
    assert (tree / "qbheat_det" / "engine" / "trainer.py").is_file()
    assert not list(tree.rglob("*.safetensors"))


def test_a_process_of_another_tree_says_so(tmp_path: Path) -> None:
    arguments = [str(tmp_path), "qb_heat_285m", str(tmp_path), "1", "1", "cpu"]
    run = subprocess.run(
        [sys.executable, training_worker.__file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode != 0
    assert f"not from {tmp_path}" in json.loads(run.stdout)["error"]


@pytest.mark.slow
def test_a_quick_run_measures_both_trees() -> None:
    rows = training_speed.run(quick=True, cases=["mf_detr_285m_211"], threads=1)
    assert [row.name for row in rows] == ["training_speed/mf_detr_285m_211_after_vs_before"]

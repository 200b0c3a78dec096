# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Stages run in order, fail alone, leave no process behind, and are not run again."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.core.errors import UserError
from qbheat_det.engine.comparison.run import (
    Runner,
    State,
    load_state,
    locked,
    share_of_threads,
    stop,
)
from qbheat_det.engine.comparison.stage import Stage, list_changes

MakeStage = Callable[..., Stage]


@pytest.fixture
def make_stage(tmp_path: Path) -> MakeStage:
    """Makes a stage whose command writes ``text`` to a file, and whose figures are that text."""

    def make(
        name: str,
        text: str = "x",
        *needs: str,
        objective: str = "a",
        code: str = "",
        settings: dict[str, Any] | None = None,
        wanted: tuple[str, ...] = (),
    ) -> Stage:
        folder = tmp_path / objective / "seed1"
        output, order = folder / f"{name}.out", tmp_path / "order"
        code = code or (
            f"open({str(output)!r}, 'w').write({text!r}); "
            f"open({str(order)!r}, 'a').write({objective + '/' + name + ' '!r})"
        )
        return Stage(
            objective,
            1,
            name,
            folder,
            command=lambda: [sys.executable, "-c", code],
            read=lambda: {"fingerprint": output.read_text()},
            settings=settings or {"config": {"SOLVER.EPOCHS": 6.0}},
            needs=needs,
            wanted=wanted,
        )

    return make


def run(stages: list[Stage], jobs: int = 1) -> tuple[State, list[str]]:
    events: list[str] = []
    state = load_state(stages)
    Runner(state, jobs=jobs, threads=3, on_change=events.append).run()
    return state, events


def ran(tmp_path: Path) -> list[str]:
    file = tmp_path / "order"
    return file.read_text().split() if file.is_file() else []


def test_a_stage_comes_after_what_it_needs_and_leaves_its_result(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    stages = [make_stage("first", "1"), make_stage("second", "2", "first")]
    state, events = run(stages, jobs=2)
    assert ran(tmp_path) == ["a/first", "a/second"]
    assert not state.failed
    content = json.loads(stages[1].result_file.read_text())
    assert content["figures"] == {"fingerprint": "2"}
    assert content["made_from"] == {"first": "1"}
    assert content["command"] == stages[1].command()
    assert content["threads"] == 3
    assert [event.split(":")[0] for event in events] == [
        "a seed 1 first", "a seed 1 first", "a seed 1 second", "a seed 1 second",
    ]  # fmt: skip


def test_what_is_done_is_not_run_again(make_stage: MakeStage, tmp_path: Path) -> None:
    stages = [make_stage("first"), make_stage("second", "2", "first")]
    run(stages[:1])
    run(stages)
    run(stages)
    assert ran(tmp_path) == ["a/first", "a/second"]


def test_what_was_made_from_another_result_is_made_again(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    run([make_stage("first", "1"), make_stage("second", "2", "first")])
    (tmp_path / "a" / "seed1" / "first.json").unlink()
    run([make_stage("first", "1"), make_stage("second", "2", "first")])  # the same came out
    (tmp_path / "a" / "seed1" / "first.json").unlink()
    run([make_stage("first", "other"), make_stage("second", "2", "first")])
    assert ran(tmp_path) == ["a/first", "a/second", "a/first", "a/first", "a/second"]


def test_a_result_that_lacks_a_wanted_figure_is_made_again(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    run([make_stage("first")])
    assert make_stage("first", wanted=("fingerprint",)).load() is not None
    assert make_stage("first", wanted=("fingerprint", "tran-4")).load() is None


def test_other_settings_are_refused_with_both_values(make_stage: MakeStage) -> None:
    run([make_stage("first")])
    changed = make_stage("first", settings={"config": {"SOLVER.EPOCHS": 8.0}})
    with pytest.raises(UserError, match=r"config\.SOLVER\.EPOCHS 6\.0 -> 8\.0.*--output-dir"):
        load_state([changed])


def test_a_file_that_is_no_result_is_refused(make_stage: MakeStage) -> None:
    stage = make_stage("first")
    stage.folder.mkdir(parents=True)
    stage.result_file.write_text('{"settings": {}}')
    with pytest.raises(UserError, match=r"first\.json' is no result"):
        load_state([stage])


def test_a_key_that_only_one_version_of_the_package_knows_is_no_change() -> None:
    before = {"images": ["a"], "config": {"OLD": 1, "BOTH": [1, 2]}}
    assert list_changes(before, {"images": ["a"], "config": {"NEW": 3, "BOTH": (1, 2)}}) == []
    assert list_changes(before, {"images": ["b"]}) == ["images ['a'] -> ['b']"]


def test_a_failed_stage_is_named_with_its_log_and_others_go_on(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    broken = make_stage("first", code="print('the reason'); raise SystemExit(3)")
    stages = [
        broken,
        make_stage("second", "2", "first"),
        make_stage("third", "3", "second"),
        make_stage("first", objective="b"),
    ]
    state, events = run(stages)
    assert ran(tmp_path) == ["b/first"]
    assert state.failed == {
        broken.key: "ended with code 3",
        stages[1].key: "needs first, which failed",
        stages[2].key: "needs second, which failed",
    }
    failure = next(event for event in events if "ended with code 3" in event)
    assert "the reason" in failure
    assert str(broken.log_file) in failure
    # Nothing of it stands in the way of another try.
    state, _ = run([make_stage("first"), *stages[1:]])
    assert not state.failed


def test_a_stage_that_ends_well_without_figures_has_failed(make_stage: MakeStage) -> None:
    stage = make_stage("first", code="pass")
    state, _ = run([stage])
    assert "ended well, but" in state.failed[stage.key]
    assert not stage.result_file.exists()


def test_no_more_processes_run_than_jobs(make_stage: MakeStage, tmp_path: Path) -> None:
    code = "import time; time.sleep(0.5)"
    stages = [make_stage(name, code=code, objective=name) for name in "abcd"]
    state, most = State(stages), 0

    def look() -> None:
        nonlocal most
        most = max(most, len(state.running))

    Runner(state, jobs=2, on_poll=look).run()
    assert most == 2


def test_threads_reach_the_processes(make_stage: MakeStage, tmp_path: Path) -> None:
    output = tmp_path / "a" / "seed1" / "first.out"
    code = f"import os; open({str(output)!r}, 'w').write(os.environ['OMP_NUM_THREADS'])"
    state, _ = run([make_stage("first", code=code)])
    assert next(iter(state.results.values()))["figures"] == {"fingerprint": "3"}


def test_threads_are_shared_and_not_more_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [share_of_threads(jobs) for jobs in (1, 2, 3, 16)] == [8, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [share_of_threads(jobs) for jobs in (1, 2, 3)] == [3, 3, 2]


def test_an_interruption_leaves_no_process(make_stage: MakeStage) -> None:
    stage = make_stage("first", code=_WITH_CHILD)
    state = State([stage])
    pids: list[int] = []

    def interrupt() -> None:
        if len(words := _log_of(stage)) == 2:
            pids.extend(map(int, words))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Runner(state, on_poll=interrupt).run()
    assert len(pids) == 2
    assert all(map(_is_gone, pids))
    assert state.running == {}


@pytest.mark.skipif(sys.platform != "linux", reason="what the kernel of Linux does")
def test_a_kill_leaves_no_process(make_stage: MakeStage) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    stage = make_stage("first", code=code)
    runner = multiprocessing.get_context("fork").Process(target=Runner(State([stage])).run)
    runner.start()
    end = time.monotonic() + 30
    while not (words := _log_of(stage)) and time.monotonic() < end:
        time.sleep(0.05)
    assert runner.pid is not None
    os.kill(runner.pid, signal.SIGKILL)
    runner.join()
    assert _is_gone(int(words[0]))


def test_a_process_that_does_not_listen_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbheat_det.engine.comparison.run._GRACE", 0.5)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"  # noqa: E501
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    stop([process])
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()


def test_two_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UserError, match="another comparison"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


_WITH_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(os.getpid(), child.pid, sep="\\n", flush=True)
time.sleep(60)
"""


def _log_of(stage: Stage) -> list[str]:
    lines = stage.log_file.read_text().splitlines() if stage.log_file.is_file() else []
    return [line for line in lines if line.isdecimal()]


def _is_gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{pid}/stat")
        if state.is_file() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""benchmarks/gpu_report.py: jobs that fail, hang or are repeated; a rehearsal on the CPU."""

import json
import os
import time

import pytest
import torch

from benchmarks import gpu_report
from benchmarks.gpu_report import Job, Report, describe_outcome, list_jobs, main, run_jobs
from benchmarks.gpu_rows import Row, Rows

# Writes a row, and does what follows.
ROW = """
import json, sys
row = {"name": "first", "outcome": "ok", "values": {"images/s": 1234.5}, "error": ""}
json.dump([row], open(sys.argv[-1], "w"))
"""


def job(name, code, part="c", seconds=60):
    return Job(name, part, ["-c", ROW + code], seconds)


def run(jobs, folder, *, fresh=False, minutes=5):
    report = Report(folder, fresh=fresh)
    run_jobs(jobs, report, rehearse=False, minutes=minutes, at_once=2)
    return json.loads((folder / "report.json").read_text())["jobs"]


def test_a_job_that_fails_or_hangs_keeps_its_rows_and_the_next_one_runs(tmp_path):
    child = tmp_path / "child.txt"
    hang = f"""
import subprocess, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(8); open({str(child)!r}, 'w')"])
time.sleep(60)
"""
    jobs = [
        job("raises", "raise RuntimeError('the kernel | is wrong')"),
        job("crashes", "import os; os.abort()"),
        job("hangs", hang, seconds=6),
        job("good", ""),
    ]
    found = run(jobs, tmp_path)
    assert {name: result["state"] for name, result in found.items()} == {
        "raises": "failed",
        "crashes": "failed",
        "hangs": "stopped after 6 s",
        "good": "done",
    }
    assert all(result["rows"][0]["name"] == "first" for result in found.values())
    assert "the kernel | is wrong" in found["raises"]["error"]
    page = (tmp_path / "report.md").read_text()
    assert "| first | ok | 1,234 |" in page
    time.sleep(4)
    assert not child.exists()  # ended with the job


def test_a_measurement_that_fails_is_a_row_of_its_own(tmp_path):
    rows = Rows(tmp_path / "rows.json")
    with rows.attempt("tried"):
        raise ZeroDivisionError("by | zero")
    with rows.attempt("peer"):
        import not_there  # noqa: F401
    rows.add(Row("passed", values={"ms": 0.5}))
    found = json.loads(rows.path.read_text())
    assert [row["outcome"] for row in found] == ["failed", "not installed", "ok"]
    assert describe_outcome(found[0]) == "failed: ZeroDivisionError: by   zero"


def test_a_repeated_call_runs_what_is_not_done(tmp_path, capsys):
    marker = tmp_path / "ran"
    counted = f"\nopen({str(marker)!r}, 'a').write('x')"
    jobs = [job("good", counted), job("bad", counted + "\nsys.exit(1)")]
    run(jobs, tmp_path)
    assert marker.read_text() == "xx"
    run(jobs, tmp_path)
    assert marker.read_text() == "xxx"
    assert "good: done before" in capsys.readouterr().out
    run(jobs, tmp_path, fresh=True)
    assert marker.read_text() == "xxxxx"
    late = run(jobs, tmp_path / "late", minutes=0)
    assert {result["state"] for result in late.values()} == {"not started: no time was left"}


def test_each_model_on_a_gpu_belongs_to_one_job():
    jobs = {job.name: job for job in list_jobs(rehearse=False)}
    (tests,) = [job for job in jobs.values() if job.part == "a"]
    assert "tests/engine/test_step.py" in tests.command
    assert not [word for word in tests.command if word.startswith("tests/gpu")]
    assert {job.part for job in jobs.values()} == {"", *gpu_report.PARTS}


def test_unknown_parts_and_machines_without_a_gpu_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, named in ((["--only", "a,f", "--rehearse"], "--only f"), ([], "--rehearse")):
        with pytest.raises(SystemExit):
            main([*words, "--output", str(tmp_path)])
        assert named in capsys.readouterr().err


@pytest.mark.slow
def test_a_rehearsal_runs_everything_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    main(["--rehearse", "--minutes", "20", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "rehearsal" / "report.json").read_text())["jobs"]
    assert {result["part"] for result in found.values()} == {"", *gpu_report.PARTS}
    rows = [row for name, result in found.items() if name != "tests" for row in result["rows"]]
    assert {row["outcome"] for row in rows} == {"ok"}
    assert len(rows) >= 15

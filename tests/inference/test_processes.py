# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction and embedding by several processes of torchrun: every image once, as by one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.pictures import draw, save, save_video

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENCODER = "distill/285M"


def _start(processes, tool, *words, cache):
    command = [sys.executable]
    if processes > 1:
        command = [*TORCHRUN, str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, str(ROOT / "tools" / f"{tool}.py"), *map(str, words)],
        env={**environment, "QBHEAT_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _run(processes, tool, *words, cache):
    process = _start(processes, tool, *words, cache=cache)
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors


@pytest.fixture
def folder(photos, tmp_path):
    """Photos with one broken file among them, and a video."""
    save_video(photos / "v.avi", [draw(96, 64, seed=index) for index in range(3)])
    return photos


def test_processes_share_the_files_of_a_prediction(detector, folder, tmp_path):
    results = {}
    drawn = {}
    for processes in (1, 3):
        file = tmp_path / f"{processes}.json"
        output = tmp_path / str(processes)
        words = ["--weights", detector, "--images", folder, "--json", file, "--output", output]
        code, printed, errors = _run(
            processes, "predict", *words, "--threshold", "0", cache=tmp_path
        )
        assert "5 files" in printed, errors  # four photos and the video
        assert errors.count("skipped") == 1
        assert code == int(processes == 1)
        results[processes] = json.loads(file.read_text())
        drawn[processes] = sorted(path.name for path in output.rglob("*.*"))
    assert results[1]
    assert results[3] == results[1]
    assert drawn[3] == drawn[1]


def test_a_prediction_can_be_repeated_after_a_process_was_killed(detector, tmp_path):
    (tmp_path / "photos").mkdir()
    for index in range(200):
        save(tmp_path / "photos" / f"{index}.png", draw(80, 60, seed=index))
    file = tmp_path / "boxes.json"
    words = ["--weights", detector, "--images", tmp_path / "photos", "--json", file]
    words += ["--output", tmp_path / "drawn", "--threshold", "0"]
    process = _start(2, "predict", *words, cache=tmp_path)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "drawn").glob("*")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode
    assert not file.exists()
    code, _, errors = _run(2, "predict", *words, cache=tmp_path)
    assert code == 0, errors
    names = {box["file_name"] for box in json.loads(file.read_text())}
    assert names == {f"{index}.png" for index in range(200)}


def test_processes_share_the_files_of_an_embedding(folder, tmp_path):
    archives = {}
    for processes in (1, 2):
        file = tmp_path / f"{processes}.npz"
        words = ["--images", folder, "--weights", ENCODER, "--output", file]
        code, _, errors = _run(processes, "embed", *words, cache=tmp_path / str(processes))
        assert "skipped" in errors
        assert code == int(processes == 1)
        archives[processes] = np.load(file)
    assert len(archives[1]["files"]) == 4
    np.testing.assert_array_equal(archives[2]["files"], archives[1]["files"])
    np.testing.assert_allclose(archives[2]["vectors"], archives[1]["vectors"], atol=2e-3)


def test_an_error_of_all_processes_is_printed_once(tmp_path):
    words = ["--weights", tmp_path / "none.onnx", "--images", ROOT / "docs"]
    code, _, errors = _run(2, "predict", *words, cache=tmp_path)
    assert code
    assert errors.count("error: ") >= 1
    words = ["--weights", "no_such_model", "--images", ROOT / "docs"]
    code, _, errors = _run(2, "predict", *words, cache=tmp_path)
    assert code
    assert errors.count("error: ") == 1

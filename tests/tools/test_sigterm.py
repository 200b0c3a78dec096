# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every command ends within ten seconds after SIGTERM, in the middle of its work."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.tiny_training import CONFIG, TINY, words_of
from tests.toy_set import draw_toy_set

ROOT = Path(__file__).resolve().parents[2]
QBHEAT = str(ROOT / "tools" / "qbheat")
DETECTOR, ENCODER = "retinanet/285M_bccd", "distill/285M"
LONG = words_of({**TINY, "SOLVER.MAX_ITER": "1000000", "SOLVER.CHECKPOINT_PERIOD": "1000000"})
RUN = f"--config-file {CONFIG} --data DATA --output OUT"

# Command, and a text of its output or the name of a file, after which its work is in progress.
COMMANDS = {
    "loading": (f"train {RUN}", ""),
    "starting": (f"train {RUN} LONG", "metrics.json"),
    "training": (f"train {RUN} LONG", "iter: 2"),
    "workers": (f"train {RUN} LONG DATALOADER.NUM_WORKERS 2", "iter: 2"),
    "evaluation": (f"train {RUN} LONG TEST.EVAL_PERIOD 1", "bbox on"),
    "features": (
        "train --config-file custom/cached_retinanet_285M_probe.yaml --data DATA --output OUT",
        "ncoding",
    ),
    "rehearsal": (f"train {RUN} --dry-run LONG", ""),
    "evaluate": (f"evaluate --weights {DETECTOR} --data CELLS", ""),
    "pretrain": ("pretrain --images IMAGES --output OUT", "metrics.json"),
    "predict": (f"predict --weights {DETECTOR} --images IMAGES --output OUT", "1.jpg"),
    "embed": (f"embed --weights {ENCODER} --images IMAGES --output OUT/v.npz", ""),
    "inspect": ("inspect --data DATA --output OUT", ""),
    "labels": ("inspect --labels --data CELLS --output OUT", "metrics.json"),
    "select": ("select --images IMAGES --budget 5 --output OUT", ""),
    "export": (f"export --weights {DETECTOR} --images IMAGES --output OUT/detector.onnx", ""),
    "report": (f"report {DETECTOR} --output OUT/report.html", ""),
    "demo": ("demo --output OUT", "metrics.json"),
    "probe": (f"probe --weights {ENCODER} --data CLASSES --val CLASSES", ""),
    "compare": ("compare --data CLASSES --val CLASSES --epochs 1 --output OUT", ""),
    "analyze": ("analyze_model --all", ""),
    "serve": (f"serve --weights {DETECTOR} --port 0", "serving"),
    "app": ("app --port 0", "The page is at"),
    "doctor": ("doctor", ""),
    "zoo": (f"zoo fetch {DETECTOR}", ""),
}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Returns a function that replaces the words in capitals of a command."""
    folder = tmp_path_factory.mktemp("data")
    data = draw_toy_set(folder, 400)
    for number in range(2):
        shutil.copytree(data / "images", folder / "classes" / str(number))
    sources = {
        "DATA": [str(data)],
        "IMAGES": [str(data / "images")],
        "CLASSES": [str(folder / "classes")],
        "CELLS": [str(ROOT / "qbheat_det" / "data" / "datasets" / "cells")],
        "LONG": LONG,
    }

    def replace(command, output):
        replaced = []
        for word in command.split():
            replaced += sources.get(word, [word.replace("OUT", str(output))])
        return replaced

    return replace


def start(command, log, **more):
    return subprocess.Popen(
        command,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        cwd=log.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
        start_new_session=True,
    )


def wait_until(is_true, process, seconds=240):
    end = time.monotonic() + seconds
    while not is_true() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    assert time.monotonic() < end, "the work did not begin"


def catches_sigterm(pid):
    """Returns whether a process has a handler of SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def end(process, log):
    """Sends SIGTERM, and checks that the process ends in time. Returns the seconds."""
    assert process.poll() is None, log.read_text()[-2000:]
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    seconds = time.monotonic() - began
    assert code in (0, 128 + signal.SIGTERM, -signal.SIGTERM, 1), log.read_text()[-2000:]
    assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
    for _ in range(100):  # workers look every five seconds whether their run is still there
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return seconds
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    raise AssertionError("a process of the command goes on")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_in_the_middle_of_its_work(name, words, tmp_path):
    if name == "app" and importlib.util.find_spec("gradio") is None:
        pytest.skip("the page needs Gradio: pip install -e .[app]")
    command, mark = COMMANDS[name]
    tool = [QBHEAT]
    if name == "analyze":
        command = command.removeprefix("analyze_model ")
        tool = [str(ROOT / "tools" / "analyze_model.py")]
    log, output = tmp_path / "log.txt", tmp_path / "out"
    process = start([sys.executable, *tool, *words(command, output)], log)
    if name != "doctor":
        wait_until(lambda: catches_sigterm(process.pid), process)
    if mark:
        wait_until(lambda: mark in log.read_text() or any(output.rglob(mark)), process)
    else:
        time.sleep(1)
    seconds = end(process, log)
    print(f"{name}: {seconds:.1f} s")

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every command ends within ten seconds after SIGTERM, in the middle of its work."""

import contextlib
import importlib.util
import os
import re
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
    "evaluate": (f"evaluate --weights {DETECTOR} --data CELLS", "Loaded"),
    "pretrain": ("pretrain --images IMAGES --output OUT", "ncoding"),
    "predict": (f"predict --weights {DETECTOR} --images IMAGES --output OUT", "*.jpg"),
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


@contextlib.contextmanager
def running(command, log):
    """Runs a command in a session of its own, of which nothing is left at the end."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(is_true, process, seconds=240):
    end = time.monotonic() + seconds
    while not is_true() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    assert time.monotonic() < end, "the work did not begin"


def status_of(pid):
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return "SigCgt: 0"


def catches_sigterm(pid):
    """Returns whether a process has a handler of SIGTERM."""
    status = status_of(pid)
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def end(process, log):
    """Sends SIGTERM, and checks that the process ends in time. Returns the seconds."""
    assert process.poll() is None, log.read_text()[-2000:]
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(10)
    seconds = time.monotonic() - began
    text = log.read_text()
    assert code in (0, 128 + signal.SIGTERM, -signal.SIGTERM), text[-2000:]
    # Python itself prints errors that a signal raises in a callback, such as of a lock.
    own = re.sub(r"Exception ignored in.*\nTraceback", "", text)
    assert "Traceback" not in own, text[-3000:]
    for _ in range(100):  # workers look every five seconds whether their run is still there
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return seconds
        time.sleep(0.1)
    raise AssertionError("a process of the command goes on")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_in_the_middle_of_its_work(name, words, tmp_path):
    if name == "app" and importlib.util.find_spec("gradio") is None:
        pytest.skip("the page needs Gradio: pip install -e .[app]")
    command, mark = COMMANDS[name]
    tool, _, flags = command.partition(" ")
    path = ROOT / "tools" / f"{tool}.py"
    start = [str(path)] if path.is_file() else [str(ROOT / "tools" / "qbheat"), tool]
    log, output = tmp_path / "log.txt", tmp_path / "out"
    with running([sys.executable, *start, *words(flags, output)], log) as process:
        if name != "doctor":
            wait_until(lambda: catches_sigterm(process.pid), process)
        if mark:
            wait_until(lambda: mark in log.read_text() or any(output.rglob(mark)), process)
        time.sleep(0.5)
        seconds = end(process, log)
    print(f"{name}: {seconds:.1f} s")


@pytest.mark.slow
def test_a_process_ends_while_it_waits_for_a_stopped_one(words, tmp_path):
    log, output = tmp_path / "log.txt", tmp_path / "out"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    tool = ["--nproc-per-node", "2", str(ROOT / "tools" / "train_net.py")]
    with running([*launcher, *tool, *words(f"{RUN} LONG", output)], log) as process:
        wait_until(lambda: "iter: 2" in log.read_text(), process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        first, second = (int(child) for child in children if catches_sigterm(child))
        os.kill(second, signal.SIGSTOP)  # the first waits for it in the next step
        try:
            time.sleep(2)
            began = time.monotonic()
            os.kill(first, signal.SIGTERM)
            while Path(f"/proc/{first}").exists() and "State:\tZ" not in status_of(first):
                assert time.monotonic() < began + 10
                time.sleep(0.1)
        finally:
            os.kill(second, signal.SIGKILL)  # it is in a session of its own
    assert "stopped by SIGTERM in the middle of a long operation" in log.read_text()

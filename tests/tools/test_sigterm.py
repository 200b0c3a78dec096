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
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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

# Commands that download something from SERVER, which never sends all of it.
DOWNLOADS = {
    "zoo": "zoo fetch timm/tf_efficientnet_lite0",
    "weights": f"train {RUN} --weights SERVER/a.pth",
    "hub": f"train {RUN} --weights hf://user/name",
    "timm": f"train {RUN} --weights timm://resnet18.a1_in1k",
    "hub_data": f"train --config-file {CONFIG} --data hf://datasets/user/name --output OUT",
    "s3": f"train --config-file {CONFIG} --data s3://bucket/folder --output OUT",
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


def start_of(tool):
    """Returns the words that start a tool."""
    path = ROOT / "tools" / f"{tool}.py"
    if path.is_file():
        return [sys.executable, str(path)]
    return [sys.executable, str(ROOT / "tools" / "qbheat"), tool]


@contextlib.contextmanager
def running(command, log, **environment):
    """Runs a command in a session of its own, of which nothing is left at the end."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
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
    log, output = tmp_path / "log.txt", tmp_path / "out"
    with running([*start_of(tool), *words(flags, output)], log) as process:
        if name != "doctor":
            wait_until(lambda: catches_sigterm(process.pid), process)
        if mark:
            wait_until(lambda: mark in log.read_text() or any(output.rglob(mark)), process)
        time.sleep(0.5)
        seconds = end(process, log)
    print(f"{name}: {seconds:.1f} s")


class Stalling(BaseHTTPRequestHandler):
    """Sends nothing to a client, or the header of a response and then a byte a second."""

    server: "StallingServer"

    def handle(self):
        if self.server.is_silent:
            self.server.is_asked.set()
            self.server.is_over.wait()
        else:
            super().handle()

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.send_header("Content-Type", "text/html")  # for pip
        self.send_header("ETag", '"1"')  # for huggingface_hub, also the next one
        self.send_header("X-Repo-Commit", "1" * 40)
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.server.is_asked.set()
        with contextlib.suppress(OSError):  # the client has ended
            while not self.server.is_over.wait(1):
                self.wfile.write(b" ")

    def log_message(self, *args):
        pass


class StallingServer(ThreadingHTTPServer):
    """A server on a free port of this machine whose answers never end."""

    def __init__(self, is_silent):
        super().__init__(("127.0.0.1", 0), Stalling)
        self.is_silent = is_silent
        self.is_asked = threading.Event()
        self.is_over = threading.Event()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return super().__enter__()

    def __exit__(self, *error):
        self.is_over.set()
        self.shutdown()
        super().__exit__(*error)


@pytest.mark.slow
@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "slow"])
@pytest.mark.parametrize("name", DOWNLOADS)
def test_a_command_ends_during_a_download_that_stalls(name, is_silent, words, tmp_path):
    if name == "s3" and importlib.util.find_spec("s3fs") is None:
        pytest.skip("s3:// needs s3fs: pip install s3fs")
    log, output = tmp_path / "log.txt", tmp_path / "out"
    tool, _, flags = DOWNLOADS[name].partition(" ")
    with StallingServer(is_silent) as server:
        address = f"127.0.0.1:{server.server_port}"
        scheme = "https" if is_silent else "http"  # https stalls in the handshake
        flags = flags.replace("SERVER", f"{scheme}://{address}")
        command = [*start_of(tool), *words(flags, output)]
        environment = {
            "FVCORE_CACHE": str(tmp_path / "cache"),
            "QBHEAT_CACHE": str(tmp_path / "cache"),
            "QBHEAT_ZOO": "",
            "NO_PROXY": "127.0.0.1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://{address}/simple",
            "HF_ENDPOINT": f"http://{address}",
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "0",
            "AWS_ENDPOINT_URL": f"http://{address}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        with running(command, log, **environment) as process:
            wait_until(server.is_asked.is_set, process)
            time.sleep(1)
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

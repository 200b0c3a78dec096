# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The pixels that a decoding process sends."""

import multiprocessing
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest

from qbheat_det.inference.decoding import _receive_pixels, _send_pixels


def test_pixels_arrive_as_sent_and_need_the_memory_of_one_image():
    turned = np.random.default_rng(0).integers(0, 256, (1200, 900, 3), np.uint8).swapaxes(0, 1)
    here, there = multiprocessing.Pipe()
    sender = threading.Thread(target=_send_pixels, args=(there, turned))
    tracemalloc.start()
    try:
        sender.start()
        received = _receive_pixels(here, turned.shape)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    sender.join()
    np.testing.assert_array_equal(received, turned)
    assert peak < 2.2 * turned.nbytes  # of the sender's copy, and of the received image


def test_a_process_that_ends_while_it_sends_pixels_is_noticed():
    here, there = multiprocessing.Pipe()
    _send_pixels(there, np.zeros((10, 10, 3), np.uint8))
    there.close()
    with pytest.raises(EOFError):
        _receive_pixels(here, (20, 10, 3))


_SCRIPT = """
from qbheat_det.core.errors import UserError
from qbheat_det.inference.decoding import DecodingProcesses
def start():
    try:
        with DecodingProcesses(2):
            print("started", flush=True)
    except UserError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("start()\n", "must do so inside 'if __name__ == \"__main__\":'"),
        ("if __name__ == '__main__':\n    start()\n", "started"),
    ],
)
def test_a_script_that_starts_itself_in_its_children_is_refused(tmp_path, call, answer):
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT + call)
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=120
    )
    (line,) = run.stdout.splitlines()
    assert line.endswith(answer)
    assert run.stderr == ""

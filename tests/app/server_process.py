# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``qbheat serve`` as a process, and an image for it."""

import contextlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CELLS = (ROOT / "docs" / "cells.jpg").read_bytes()
ENTRY = "retinanet/285M_bccd"


@contextlib.contextmanager
def server_process():
    """Runs ``qbheat serve``, and yields the process and its port."""
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), "--weights", ENTRY, "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split(" on ")[1].split(",")[0]
            yield process, int(address.rpartition(":")[2])
        finally:
            process.kill()

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Keys of how a step computes: what they ask of the process."""

import logging
import subprocess
import sys

import pytest
from torch import nn

from qbheat_det.config import get_cfg
from qbheat_det.engine import step_keys

# Memory of 64 MiB is freed; what the process still holds of it is printed, in MiB.
_PROGRAM = """
import torch
from torch import nn
from qbheat_det.config import get_cfg
from qbheat_det.engine.memory import read_kib, _STATUS
from qbheat_det.engine.step_keys import use_step_keys
cfg = get_cfg()
cfg.SOLVER.KEEP_MEMORY = {kept}
use_step_keys(cfg, nn.Linear(2, 2))
before = read_kib(_STATUS, "VmRSS:")
block = torch.zeros(16 << 20)
del block
print((read_kib(_STATUS, "VmRSS:") - before) / 1024)
"""


@pytest.mark.parametrize("kept", [True, False])
def test_freed_memory_is_kept_where_the_key_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(step_keys, "keep_freed_memory", lambda: not calls.append(True))
    cfg = get_cfg()
    assert cfg.SOLVER.KEEP_MEMORY  # the default
    cfg.SOLVER.KEEP_MEMORY = kept
    with caplog.at_level(logging.INFO, logger="qbheat_det"):
        step_keys.use_step_keys(cfg, nn.Linear(2, 2))
    assert bool(calls) is kept
    assert ("SOLVER.KEEP_MEMORY False gives it back" in caplog.text) is kept


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("kept", [True, False])
def test_a_process_holds_what_it_keeps(kept: bool) -> None:
    import platform

    if platform.libc_ver()[0] != "glibc":
        pytest.skip("malloc is not glibc's")
    command = [sys.executable, "-c", _PROGRAM.format(kept=kept)]
    held = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (held > 60) is kept

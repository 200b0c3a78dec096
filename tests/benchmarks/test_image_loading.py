# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of reading images runs, and leaves the package as it was."""

import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import image_loading
from qbheat_det.data import images
from tests.data.pictures import draw, save


def test_a_table_of_images_per_second_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        save(tmp_path / f"{i}.jpg", draw(120, 90, seed=i))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(
        sys, "argv", ["image_loading.py", "--image-folder", str(tmp_path), "--sizes", "16", "32"]
    )
    before = images._REDUCTIONS
    image_loading.main()
    assert images._REDUCTIONS == before
    rows = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\| \d", line)]
    assert [row.count("|") for row in rows] == [6, 6]
    assert all(float(figure.replace(",", "")) > 0 for row in rows for figure in row.split("|")[2:6])

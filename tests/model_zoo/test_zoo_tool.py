# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``tools/zoo.py`` list and fetch."""

import json
import re
from pathlib import Path

import pytest

from qbheat_det.model_zoo.index import load_index
from tests.tool_modules import load_tool

from .conftest import CONTENT, DETECTOR, MakeEntry, make_entry, save_index

TOOL = load_tool("zoo")


@pytest.fixture(autouse=True)
def _two_entries(ship: MakeEntry) -> None:
    ship()
    missing = make_entry("mf_detr/tiny", b"x" * 2**20, metrics=())
    save_index([*load_index(), missing])


def test_the_list_has_metrics_sizes_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert TOOL.main(["list"]) == 0
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["name", "task", "metrics", "size", "from"],
        ["mf_detr/tiny", "detection", "none measured", "1.0 MiB", "nowhere"],
        ["retinanet/tiny", "detection", "AP 12.5 % (toy val)", "20.5 KiB", "shipped"],
    ]
    assert TOOL.main(["list", "fcos/*"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fcos/*" in captured.err
    assert TOOL.main(["list", "retinanet/*", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["from"]) == (DETECTOR, "shipped")
    assert found["metrics"][0]["value"] == 12.5
    assert "fingerprint" not in found


def test_fetched_files_can_be_copied_to_a_folder_for_another_machine(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert TOOL.main(["fetch", DETECTOR, "retina*"]) == 0
    assert capsys.readouterr().out == f"{shipped}/retinanet-tiny.safetensors\n"
    copy = tmp_path / "copies" / "retinanet-tiny.safetensors"
    for _ in range(2):
        assert TOOL.main(["fetch", DETECTOR, "--output", str(copy.parent)]) == 0
        assert capsys.readouterr().out == f"{copy}\n"
        monkeypatch.setenv("QBHEAT_ZOO", str(copy.parent))
    assert copy.read_bytes() == CONTENT
    for name, named in (
        *(("retinanet/tiney", DETECTOR), ("fcos/*", "'fcos/*'")),
        ("mf_detr/tiny", "'mf_detr-tiny.safetensors'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            TOOL.main(["fetch", name])
        assert named in capsys.readouterr().err

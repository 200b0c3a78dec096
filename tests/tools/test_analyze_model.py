# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The two reports of tools/analyze_model.py."""

import json
from pathlib import Path

import pytest

from qbheat_det.analysis import paper_tables
from qbheat_det.analysis.paper_tables import PaperCell

from ..tool_modules import load_tool

CELLS = [
    PaperCell(1, "net MAdds", "M", 285, 284.627, True, "MAdds by EXT"),
    PaperCell(14, "pyramid params", "M", 61.4, 9.586, False, "all parameters"),
]
CONFIG = "MODEL: {META_ARCHITECTURE: MFDETR, BACKBONE: {NAME: MobileFormer, FREEZE_AT: 0}}\n"


def test_all_cells_are_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paper_tables, "compare_with_paper", lambda: CELLS)  # has its own test
    load_tool("analyze_model").main(["--all", "--json", str(tmp_path / "cells.json")])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line[2:3] in ("✓", "✗")]
    assert [row[:2] for row in rows] == [["✓", "net"], ["✗", "pyramid"]]
    assert [row["match"] for row in json.loads((tmp_path / "cells.json").read_text())] == [
        True, False
    ]  # fmt: skip


def test_a_config_gives_a_table_of_the_modules_of_inference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "detector.yaml"
    config.write_text(f"{CONFIG}VERSION: 2\n")
    words = ["--config-file", str(config), "--size", "64", "96", "--depth", "1"]
    load_tool("analyze_model").main([*words, "MODEL.MF_DETR.NUM_BLOCKS", "[1, 1, 1]"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(row for row in rows if row[:1] == ["backbone"])[1:3] == ["4.947", "M"]
    assert any(row[:1] == ["decoder"] for row in rows)


@pytest.mark.parametrize("words", ["", "--all --config-file x", "--config-file missing.yaml"])
def test_wrong_arguments_are_exit_code_2(words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        load_tool("analyze_model").main(words.split())
    assert ended.value.code == 2

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The two reports of tools/analyze_model.py."""

import json
from pathlib import Path

import pytest

from qbheat_det.analysis import paper_tables
from qbheat_det.analysis.paper_tables import PaperCell

from ..analysis.tiny_runs import mf_detr_config
from ..tool_modules import load_tool

CELLS = [
    PaperCell(1, "net MAdds", "M", 285, 284.627, True, "MAdds by EXT"),
    PaperCell(14, "pyramid params", "M", 61.4, 9.586, False, "all parameters"),
]


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
    (tmp_path / "detector.yaml").write_text(mf_detr_config().dump())
    words = ["--config-file", str(tmp_path / "detector.yaml"), "--size", "64", "96"]
    load_tool("analyze_model").main([*words, "--depth", "1", "MODEL.MF_DETR.NHEADS", "4"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {"backbone", "decoder"} <= {row[0] for row in rows if row}


def test_wrong_arguments_are_exit_code_2() -> None:
    for words in ("", "--all --config-file x", "--config-file missing.yaml"):
        with pytest.raises(SystemExit, match="2"):
            load_tool("analyze_model").main(words.split())

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The two reports of tools/analyze_model.py."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from qbheat_det.analysis import paper_tables
from qbheat_det.analysis.paper_tables import PaperCell

from ..tool_modules import load_tool

CELLS = [
    PaperCell(1, "net MAdds", "M", 285, 284.627, True, "MAdds by EXT", True),
    PaperCell(5, "head params", "M", 11.7, 11.743, True, "without BatchNorm", False),
    PaperCell(14, "pyramid params", "M", 61.4, 9.586, False, "all parameters", False),
]


@pytest.fixture(scope="module")
def analyze_model() -> ModuleType:
    return load_tool("analyze_model")


@pytest.fixture(autouse=True)
def counted_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    # Counting the real ones takes half a minute and has its own test.
    monkeypatch.setattr(paper_tables, "compare_with_paper", lambda: CELLS)


def test_all_prints_matched_and_unmatched_cells_and_their_number(
    analyze_model: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    analyze_model.main(["--all"])
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if "net MAdds" in line).startswith("  ✓")
    assert next(line for line in lines if "pyramid params" in line).startswith("  ✗")
    assert "2 of 3" in lines[-1]
    assert "pyramid params" in lines[-1]


def test_json_lists_every_cell(analyze_model: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new" / "cells.json"
    analyze_model.main(["--all", "--json", str(path)])
    rows = json.loads(path.read_text())
    assert [row["match"] for row in rows] == [True, True, False]
    assert {"table", "cell", "unit", "paper", "ours", "match", "rule"} <= set(rows[0])
    assert list(path.parent.iterdir()) == [path]


def test_a_config_gives_a_table_of_the_modules_of_inference(
    analyze_model: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "detector.yaml"
    config.write_text(
        "MODEL:\n"
        "  META_ARCHITECTURE: MFDETR\n"
        "  BACKBONE: {NAME: MobileFormer, FREEZE_AT: 0}\n"
        "  MF_DETR: {NUM_BLOCKS: [1, 1, 1], DENOISING: {GROUPS: 5}}\n"
        "VERSION: 2\n"
    )
    analyze_model.main(["--config-file", str(config), "--size", "64", "96", "--depth", "1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    modules = [row[0] for row in rows[rows.index(["module", "params", "CORE", "EXT"]) :]]
    assert [name for name in modules if name.isalpha()] == [
        "module", "whole", "backbone", "decoder"
    ]  # fmt: skip
    backbone = next(row for row in rows if row[:1] == ["backbone"])
    assert backbone[1:3] == ["4.947", "M"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--all", "--config-file", "x.yaml"],
        ["--config-file", "x.yaml", "--json", "y.json"],
        ["--config-file", "missing.yaml"],
        ["--config-file", "x.yaml", "--size", "8", "8"],
    ],
)
def test_wrong_arguments_are_exit_code_2(analyze_model: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        analyze_model.main(arguments)
    assert exit_info.value.code == 2

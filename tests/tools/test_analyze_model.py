# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The two reports of tools/analyze_model.py."""

import json
from pathlib import Path

import pytest

from qbheat_det.analysis.paper_tables import PaperCell
from tools import analyze_model

CELLS = [
    PaperCell(1, "net MAdds", "M", 285, 284.627, True, "MAdds by EXT", True),
    PaperCell(5, "head params", "M", 11.7, 11.743, True, "without BatchNorm", False),
    PaperCell(14, "pyramid params", "M", 61.4, 9.586, False, "all parameters", False),
]


@pytest.fixture(autouse=True)
def counted_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    # The true ones take half a minute and have their own test.
    monkeypatch.setattr(analyze_model, "compare_with_paper", lambda: CELLS)


def test_all_prints_matched_and_unmatched_cells_and_says_how_many(
    capsys: pytest.CaptureFixture[str],
) -> None:
    analyze_model.main(["--all"])
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if "net MAdds" in line).startswith("  ✓")
    assert next(line for line in lines if "pyramid params" in line).startswith("  ✗")
    assert lines[-1] == ("2 of 3 printed cells matched; the others are: pyramid params (Table 14).")
    assert "2 of 2; 1 with one rule" in lines[-2]
    assert any(line.startswith("CORE: ") for line in lines)
    assert any(line.startswith("EXT: ") for line in lines)


def test_json_lists_every_cell_and_leaves_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cells.json"
    analyze_model.main(["--all", "--json", str(path)])
    rows = json.loads(path.read_text())
    assert [row["match"] for row in rows] == [True, True, False]
    assert set(rows[0]) == {"table", "cell", "unit", "paper", "ours", "match", "rule"}
    assert list(path.parent.iterdir()) == [path]


def test_a_config_gives_a_table_of_the_modules_of_inference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert modules == ["module", "whole", "backbone", "decoder"]
    backbone = next(row for row in rows if row[:1] == ["backbone"])
    assert backbone[1:3] == ["4.947", "M"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give either --all or --config-file F"),
        (["--all", "--config-file", "x.yaml"], "give either --all or --config-file F"),
        (["--config-file", "x.yaml", "--json", "y.json"], "--json belongs to --all"),
        (["--config-file", "missing.yaml"], "config file 'missing.yaml' does not exist"),
        (["--config-file", "x.yaml", "--size", "8", "8"], "at least 32"),
    ],
)
def test_bad_flags_end_with_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        analyze_model.main(arguments)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.startswith("error: ")

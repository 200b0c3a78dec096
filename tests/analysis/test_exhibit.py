# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What an exhibit writes: whole files, and JSON that every reader takes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from qbheat_det.analysis.exhibit import Exhibit, remove_exhibit, to_json, write_exhibit
from qbheat_det.analysis.html_report import Picture, Table
from qbheat_det.core.errors import UserError

SVG, PNG = "image/svg+xml", "image/png"


def make_exhibit() -> Exhibit:
    pictures = {
        "chart": Picture(b"<svg/>", SVG, "a chart", dark=b"<svg id='dark'/>"),
        "sheet_1": Picture(b"png", PNG, "a sheet"),
    }
    figures = {"energy": torch.tensor([1.5, 2.0]), "rank": np.int64(3), "error": math.nan}
    table = Table(("run", "rank"), [("a", "3")])
    return Exhibit("spectrum", "Spectrum", ["What it shows."], pictures, figures, table)


def test_pictures_and_numbers_are_files_of_the_exhibits_name(tmp_path: Path) -> None:
    written = write_exhibit(make_exhibit(), tmp_path / "new")
    assert {path.name: path.read_bytes() for path in written[1:]} == {
        "spectrum_chart.svg": b"<svg/>",
        "spectrum_chart_dark.svg": b"<svg id='dark'/>",
        "spectrum_sheet_1.png": b"png",
    }
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(
        path.name for path in written
    )
    assert json.loads(written[0].read_text(), parse_constant=pytest.fail) == {
        "name": "spectrum",
        "title": "Spectrum",
        "explanation": ["What it shows."],
        "figures": {"energy": [1.5, 2.0], "rank": 3, "error": None},
        "files": ["spectrum_chart.svg", "spectrum_chart_dark.svg", "spectrum_sheet_1.png"],
        "table": {"header": ["run", "rank"], "rows": [["a", "3"]]},
    }


def test_what_an_earlier_exhibit_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    write_exhibit(make_exhibit(), tmp_path)
    others = {"spectrum_mine.png", "notes.txt", "spectrum_sheet_2.png", "curves.json"}
    for name in others:
        (tmp_path / name).write_text("{}")
    picture = Picture(b"png", PNG, "a sheet")
    write_exhibit(Exhibit("spectrum", "Spectrum", pictures={"sheet_3": picture}), tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"spectrum.json", "spectrum_sheet_3.png"} | others
    # A JSON that names what is none of its pictures costs nobody a file.
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.png").write_text("")
    named = [*others - {"spectrum_mine.png"}, "../a.png", "spectrum_/../inner/a.png", 3]
    named.remove("spectrum_sheet_2.png")
    content = {"name": "spectrum", "files": ["spectrum_sheet_3.png", *named]}
    (tmp_path / "spectrum.json").write_text(json.dumps(content))
    for name in ("curves", "none", "../spectrum", "spectrum"):
        remove_exhibit(name, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others | {"inner"}
    assert (tmp_path / "inner" / "a.png").exists()


def test_nested_figures_become_plain_numbers() -> None:
    figures = {
        1: (np.float32(0.5), np.array([[1, 2]]), torch.tensor(True)),
        "complex": 1 + 2j,
        "eigenvalues": np.array([1j, -math.inf]),
        "path": Path("a/b"),
    }
    assert to_json(figures) == {
        "1": [0.5, [[1, 2]], True],
        "complex": [1.0, 2.0],
        "eigenvalues": [[0.0, 1.0], [None, 0.0]],
        "path": "a/b",
    }
    with pytest.raises(TypeError, match="object has no place in figures"):
        to_json({"what": [object()]})


def test_names_that_leave_the_folder_and_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no name for a file"):
        Exhibit("../curves", "Curves")
    with pytest.raises(ValueError, match="no name for a file"):
        Exhibit("curves", "Curves", pictures={"a/b": Picture(b"", PNG, "")})
    with pytest.raises(ValueError, match="unknown kind 'text/html'"):
        Exhibit("curves", "Curves", pictures={"a": Picture(b"", "text/html", "")})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_exhibit(make_exhibit(), tmp_path / "file")

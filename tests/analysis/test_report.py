# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reports: one escaped page without the network, and figures that fail one at a time."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from qbheat_det.analysis.figure import FigureOptions
from qbheat_det.analysis.report import FigureResult, write_page
from qbheat_det.analysis.run import Run
from qbheat_det.core.figures import FIGURES, Figure, Image, NotApplicable, Table
from tests.tool_modules import load_tool

from .tiny_runs import retinanet_config, write_run


def make_figure(runs: Sequence[Run], options: FigureOptions) -> Figure:
    table = Table(("Run", "n", "why"), [("a", "1", "x < y"), ("b", "-2", "")])
    image = Image.from_rgb(np.zeros((20, 30, 3), np.uint8), alt='"a"', caption="<i>")
    data = {"seed": options.seed}
    return Figure("curves", "Wide <things>", ["words"], {"sheet": image}, data, table)


def fail(error: BaseException) -> Callable[..., Figure]:
    def draw(runs: Sequence[Run], options: FigureOptions) -> Figure:
        raise error

    return draw


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/report.py with figures that draw, do not apply, fail, and are interrupted."""
    monkeypatch.setattr("qbheat_det.analysis.load_figures", dict)
    for name, function in {
        "curves": make_figure,
        "spectrum": fail(NotApplicable("no <linear> models")),
        "probes": fail(ZeroDivisionError("by zero")),
        "beyond": fail(KeyboardInterrupt()),
    }.items():
        monkeypatch.setitem(FIGURES, name, function)
    return load_tool("report")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_run(tmp_path_factory.mktemp("runs") / "a", retinanet_config()))


def test_a_page_escapes_text_and_loads_nothing(tmp_path: Path) -> None:
    drawn = FigureResult("curves", make_figure([], FigureOptions()))
    results = [drawn, drawn, FigureResult("S & T", reason="\udcff")]
    write_page(tmp_path / "new" / "page.html", "<title>", Table((), []), results, "a <b>")
    text = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    for escaped in ("<h1>&lt;title&gt;</h1>", "S &amp; T", "x &lt; y", "a &lt;b&gt;", "\\udcff",
                    "<figcaption>&lt;i&gt;", 'alt="&#34;a&#34;"'):  # fmt: skip
        assert escaped in text
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    assert "<script" not in text
    assert set(re.findall(r'href="#(\d)"', text)) == set(re.findall(r'section id="(\d)"', text))
    assert '<th scope="col" class="text">why</th>' in text  # columns of words on the left
    assert '<th scope="col">n</th>' in text


def test_a_report_has_every_figure_or_the_reason_why_not_and_after_an_interrupt_what_was_drawn(
    tool: ModuleType, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    words = [run, "--output", str(path), "--seed", "3", "--only"]
    assert tool.main([*words, "spectrum", "curves"]) == 0
    text = path.read_text(encoding="utf-8")
    assert "Wide &lt;things&gt;" in text
    assert "no &lt;linear&gt; models" in text
    files = {file.name for file in (tmp_path / "page").iterdir()}
    assert files == {"curves.json", "curves_sheet.jpg"}
    assert json.loads((tmp_path / "page" / "curves.json").read_text())["data"] == {"seed": 3}
    # A figure that fails costs itself and the exit code; files of an earlier report go.
    (tmp_path / "page" / "curves_mine.jpg").write_text("")
    assert tool.main([*words, "probes", "spectrum"]) == 1
    assert "probes: ZeroDivisionError: by zero" in capsys.readouterr().err
    left = {file.name for file in (tmp_path / "page").iterdir()}
    assert left == {"curves_mine.jpg"}

    path = tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        tool.main([run, "--output", str(path), "--only", "curves", "beyond"])
    assert ended.value.code == 130
    assert "Wide &lt;things&gt;" in path.read_text()


@pytest.mark.parametrize("name", ["folder.html", "page.html", f"{'x' * 300}.html"])
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_drawn(
    tool: ModuleType, run: str, tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "page").write_text("")  # where the folder of page.html belongs
    with pytest.raises(SystemExit) as ended:
        tool.main([run, "--output", str(tmp_path / name), "--only", "beyond"])
    assert ended.value.code == 2  # not 130: the figure was not begun

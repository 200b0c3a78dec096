# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/report.py: one page for everything, looked at in a real browser where there is one."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.html_report import Picture, Table
from qbheat_det.engine.seeing.options import Sight, SightOptions
from qbheat_det.engine.seeing.refusal import NothingToSee
from qbheat_det.engine.seeing.subject import Subject

from ..browser import CHROMIUM, Browser
from ..tool_modules import load_tool
from .test_see import make_run

TAP = """
(() => {
  const sheet = document.querySelector('img[alt=noise]'), box = sheet.closest('.pan');
  const widths = [];
  for (let tap = 0; tap < 3; tap++) {
    widths.push(Math.round(sheet.getBoundingClientRect().width)); sheet.click();
  }
  sheet.closest('.pan').querySelector('input').checked = true;
  return { widths, pan: box.clientWidth, scroll: document.documentElement.scrollWidth,
    row: Math.round(document.querySelector('.grid').getBoundingClientRect().width),
    high: Math.round(document.querySelector('img[alt^=as]').closest('figure')
      .getBoundingClientRect().width) }
})()
"""
VIS = """
Promise.all([...document.images].map(i => i.decode().then(() => true, () => false))).then(done => ({
  decoded: done, widths: [...document.images].map(i => i.naturalWidth),
  alts: [...document.images].map(i => i.alt), sources: [...document.images].map(i => i.currentSrc),
  scroll: document.documentElement.scrollWidth, shown: document.documentElement.clientWidth,
  page: getComputedStyle(document.body).backgroundColor,
  figures: [...document.querySelectorAll('figure')].map(f => f.getBoundingClientRect().left),
  anchors: [...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))
}))
"""


def see_wide(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    sheet = np.random.default_rng(0).integers(0, 255, (100, 900, 3), dtype=np.uint8)
    header = [f"a column with a long name, {index}" for index in range(12)]
    return Exhibit(
        "wide",
        "Wide <things> & more",
        ["A word-that-cannot-be-broken-" + "x" * 80],
        {
            "sheet": Picture.from_rgb(sheet, alt="noise"),
            "small": Picture.from_rgb(sheet[:, :90], alt="s"),
            "high": Picture.from_rgb(np.zeros((720, 720, 3), np.uint8), alt="as wide as high"),
        },
        {"seed": options.seed},
        Table(header, [header, header]),
    )


def see_nothing(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    raise NothingToSee("no <linear> models")


def see_interrupted(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    raise KeyboardInterrupt


def see_defect(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    raise ZeroDivisionError("by zero")


@pytest.fixture(scope="module")
def report() -> ModuleType:
    tool = load_tool("report")
    tool.SIGHTS = {
        "curves": tool.SIGHTS["curves"],
        "wide": Sight("wide", "wide things", see_wide),
        "nothing": Sight("nothing", "nothing", see_nothing),
        "defect": Sight("defect", "a defect", see_defect),
        "interrupted": Sight("interrupted", "as if by Ctrl-C", see_interrupted),
        "behind": Sight("behind", "wide things again", see_wide),
    }
    return tool


@pytest.fixture(scope="module")
def page(report: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    runs = [str(make_run(folder / "a")), str(make_run(folder / "b", slope=2.0))]
    words = ["--only", "curves", "wide", "nothing", "--output", str(folder / "page.html")]
    assert report.main([*runs, *words]) == 0
    return folder / "page.html"


def test_the_page_has_what_could_be_made_and_says_why_the_rest_is_not_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "Training curves" in text
    assert "Wide &lt;things&gt; &amp; more" in text
    assert "no &lt;linear&gt; models" in text
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    files = {path.name for path in (page.parent / "page").iterdir()}
    assert {"curves.json", "curves_bbox-AP.svg", "wide.json", "wide_sheet.jpg"} <= files
    content = json.loads((page.parent / "page" / "report.json").read_text())
    assert [run["label"] for run in content["runs"]] == ["a", "b"]
    assert {sight["name"]: sight["made"] for sight in content["sights"]} == {
        "curves": True, "wide": True, "nothing": False
    }  # fmt: skip


def test_a_sight_that_fails_costs_its_section_and_the_exit_code(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = str(make_run(tmp_path / "a")), tmp_path / "page.html"
    assert report.main([run, "--output", str(path), "--only", "defect", "wide"]) == 1
    assert "defect failed: ZeroDivisionError: by zero" in capsys.readouterr().err
    text = path.read_text(encoding="utf-8")
    assert "ZeroDivisionError: by zero" in text
    assert "Wide" in text
    assert "Training curves" not in text


def test_a_report_of_fewer_sights_removes_the_files_of_the_others(
    report: ModuleType, tmp_path: Path
) -> None:
    run, path = str(make_run(tmp_path / "a")), tmp_path / "page.html"
    assert report.main([run, "--output", str(path), "--only", "wide", "nothing"]) == 0
    (tmp_path / "page" / "wide_mine.jpg").write_text("")
    assert report.main([run, "--output", str(path), "--only", "nothing"]) == 0
    left = {entry.name for entry in (tmp_path / "page").iterdir()}
    assert left == {"report.json", "wide_mine.jpg"}
    (tmp_path / "page" / "report.json").write_text('{"sights": 3}')
    assert report.main([run, "--output", str(path), "--only", "nothing"]) == 0


def test_ctrl_c_leaves_a_page_of_what_there_is_and_says_so(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = str(make_run(tmp_path / "a")), tmp_path / "page.html"
    words = ["--only", "wide", "interrupted", "behind", "nothing"]
    with pytest.raises(SystemExit) as ended:
        report.main([run, "--output", str(path), *words])
    assert ended.value.code == 130
    # In the order of the table: "nothing" was done before.
    assert f"2 of 4 sights are on {path}" in capsys.readouterr().err
    text = path.read_text(encoding="utf-8")
    assert "Wide &lt;things&gt;" in text
    why = "not made: the report ended before, or is still being made"
    assert f'<th scope="row">interrupted, behind</th><td>{why}</td>' in text
    assert (tmp_path / "page" / "wide_sheet.jpg").exists()
    content = json.loads((tmp_path / "page" / "report.json").read_text())
    assert [sight["made"] for sight in content["sights"]] == [True, False, False, False]


def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(make_run(tmp_path / "a"))
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "page").write_text("")
    for name, reason in {
        "folder.html": "a folder has that name; choose another name",
        "page.html": "a file stands where a folder is needed; choose another folder",
        f"{'x' * 300}.html": "that name is too long for the file system; choose a shorter one",
    }.items():
        with pytest.raises(SystemExit) as ended:
            report.main([run, "--output", str(tmp_path / name), "--only", "interrupted"])
        assert ended.value.code == 2  # not 130: the sight was not begun
        assert reason in capsys.readouterr().err


def test_an_output_that_is_no_page_and_unknown_sights_are_refused(report: ModuleType) -> None:
    for words in (["run", "--output", "report.pdf"], ["run", "--only", "aurora"], []):
        with pytest.raises(SystemExit) as ended:
            report.main(words)
        assert ended.value.code == 2


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize(
    ("width", "scheme", "colour"),
    [(390, "light", "rgb(251, 251, 250)"), (1280, "dark", "rgb(18, 19, 22)")],
)
def test_in_a_browser_every_picture_loads_nothing_is_fetched_and_nothing_sticks_out(
    browser: Browser, page: Path, width: int, scheme: str, colour: str
) -> None:
    browser.open(page, width=width, height=844, scheme=scheme)
    seen = browser.evaluate(VIS)
    assert browser.faults == []
    assert browser.requests == [page.resolve().as_uri()]
    assert len(seen["widths"]) >= 5
    assert all(seen["decoded"])
    assert min(seen["widths"]) > 0
    assert all(seen["alts"])
    assert seen["scroll"] <= seen["shown"] == width
    assert seen["page"] == colour
    assert seen["anchors"]
    columns = len({round(left) for left in seen["figures"]})
    assert columns == (1 if width == 390 else 2)


@pytest.mark.parametrize(("width", "fit"), [(390, 608), (1280, 1054)])
def test_a_tap_shows_a_sheet_in_full_size_and_sheets_take_the_whole_width(
    browser: Browser, page: Path, width: int, fit: int
) -> None:
    browser.open(page, width=width, height=844, scheme="light")
    seen = browser.evaluate(TAP)
    full = max(900, seen["pan"])
    assert seen["widths"] == [fit, full, fit]
    assert seen["high"] == seen["row"]
    assert seen["scroll"] == width


def test_a_dark_screen_gets_the_dark_charts(browser: Browser, page: Path) -> None:
    shown = {}
    for scheme in ("light", "dark"):
        browser.open(page, width=800, height=600, scheme=scheme)
        shown[scheme] = browser.evaluate(VIS)["sources"]
    charts = [source.startswith("data:image/svg") for source in shown["light"]]
    differ = [light != dark for light, dark in zip(*shown.values(), strict=True)]
    assert any(charts)
    assert differ == charts


def test_the_browser_would_see_a_picture_that_is_broken_and_an_error(
    browser: Browser, tmp_path: Path
) -> None:
    page = tmp_path / "broken.html"
    page.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'>"
        "<img alt='' src='data:image/png;base64,AAAA'><img src='gone.png'><nav></nav>"
        "<div style='width:700px'>wide</div><script>undefinedFunction()</script>"
    )
    browser.open(page, width=390, height=844, scheme="light")
    seen = browser.evaluate(VIS)
    assert seen["decoded"] == [False, False]
    assert seen["widths"] == [0, 0]
    assert len(browser.faults) >= 2
    assert seen["scroll"] >= 700
    assert len(browser.requests) == 2

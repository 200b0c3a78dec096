# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The report: one file that needs nothing else, with every text escaped."""

import base64
from html.parser import HTMLParser
from pathlib import Path

import cv2
import numpy as np
import pytest

from qbheat_det.analysis.html_report import (
    Picture,
    Report,
    Section,
    SummaryFigure,
    Table,
    render_report,
    write_report,
)
from qbheat_det.core.errors import UserError

VOID = {"meta", "img", "source", "link", "br", "input"}


class _Page(HTMLParser):
    """Notes elements and checks that they are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _report(text: str = "plain") -> Report:
    image = np.zeros((20, 30, 3), np.uint8)
    image[..., 0] = 250
    return Report(
        title=text,
        lead=text,
        figures=[SummaryFigure(value=text, label=text, note=text)],
        sections=[
            Section(
                title=text,
                paragraphs=[text],
                pictures=[
                    Picture.from_rgb(image, alt=text, caption=text),
                    Picture(b"<svg/>", "image/svg+xml", alt=text, dark=b"<svg id='dark'/>"),
                ],
                table=Table((text, text), [(text, text)]),
                commands=[text, text],
            )
        ],
        footer=text,
    )


def test_the_page_fetches_nothing_and_runs_nothing() -> None:
    page = _Page(render_report(_report()))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base"}
    addresses = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in {"src", "srcset", "href", "action", "data"}
    ]
    assert len(addresses) == 3
    assert all(address and address.startswith("data:image/") for address in addresses)
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    style = render_report(_report()).split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert ("meta", "viewport") in [(t, a.get("name")) for t, a in page.elements]


def test_every_text_is_escaped() -> None:
    harmful = "<script>alert('&\"')</script>"
    page = _Page(render_report(_report(harmful)))
    assert "script" not in {tag for tag, _ in page.elements}
    # Title twice, lead, figure 3, heading, paragraph, caption, table 4, commands 2, footer.
    assert page.text.count(harmful) == 2 + 1 + 3 + 1 + 1 + 1 + 4 + 2 + 1
    assert [a["alt"] for t, a in page.elements if t == "img"] == [harmful, harmful]


def test_pictures_survive_the_trip_into_the_page() -> None:
    page = _Page(render_report(_report()))
    source = next(a["src"] for t, a in page.elements if t == "img")
    assert source is not None
    content = base64.b64decode(source.split("base64,")[1])
    decoded = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
    assert decoded.shape == (20, 30, 3)
    np.testing.assert_allclose(decoded[10, 15], (0, 0, 250), atol=4)  # BGR: still red


def test_a_dark_twin_is_offered_to_dark_screens() -> None:
    page = _Page(render_report(_report()))
    (source,) = [a for t, a in page.elements if t == "source"]
    assert source["media"] == "(prefers-color-scheme: dark)"
    assert base64.b64encode(b"<svg id='dark'/>").decode() in (source["srcset"] or "")


def test_a_chart_is_drawn_for_both_screens_and_its_caption_is_its_text() -> None:
    picture = Picture.from_chart(lambda theme: f"<svg id='{theme}'/>".encode(), caption="AP")
    assert picture == Picture(
        b"<svg id='light'/>", "image/svg+xml", alt="AP", caption="AP", dark=b"<svg id='dark'/>"
    )


def test_columns_of_words_stand_left_and_those_of_numbers_right() -> None:
    table = Table(("Run", "Model", "AP"), [("a", "QBHeat", "n/a"), ("b", "2D net", "-0.5")])
    words = Table(("Run", "Model", "AP"), [("a", "QBHeat", "0.5"), ("b", "MFDETR", "\u22121")])
    for one, expected in ((table, [False, False]), (words, [True, False])):
        page = _Page(render_report(Report("T", "L", (), [Section("S", table=one)])))
        kinds = [a.get("class") == "words" for t, a in page.elements if t == "th" and "col" in
                 (a.get("scope") or "")]  # fmt: skip
        assert kinds[1:] == expected


def test_an_empty_report_is_still_a_page() -> None:
    page = _Page(render_report(Report("Title", "Lead", figures=(), sections=[Section("Alone")])))
    assert "dl" not in {tag for tag, _ in page.elements}
    assert "Alone" in page.text


def test_the_page_is_written_whole_into_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "report.html"
    write_report(_report("Zürich"), path)
    assert path.read_text(encoding="utf-8") == render_report(_report("Zürich"))
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(UserError, match="cannot write"):
        write_report(_report(), path / "below a file")

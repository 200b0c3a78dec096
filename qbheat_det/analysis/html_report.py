# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A report as one HTML file: pictures inside it, no scripts, nothing fetched from anywhere.

It opens by double click, reads well on a phone and on paper, and follows the reader's choice of
a light or a dark screen. All text is escaped.
"""

import base64
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from qbheat_det.core.files import write_atomically

from .charts import Theme
from .report_style import STYLE

_WIDE = 1.9  # times as wide as high: two such beside each other would be too small to read
_SHEET = 700  # pixels: a photo or a drawing of more has letters in it that want the full width


@dataclass(frozen=True)
class Picture:
    """An encoded picture; ``dark``, if given, is shown in its place on dark screens."""

    content: bytes
    media_type: str
    alt: str
    caption: str = ""
    dark: bytes | None = None

    @classmethod
    def from_rgb(
        cls, image: npt.NDArray[np.uint8], *, alt: str, caption: str = "", quality: int = 90
    ) -> "Picture":
        """Encodes a (H, W, 3) RGB image as JPEG."""
        bgr = np.ascontiguousarray(image[:, :, ::-1])
        _, encoded = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, quality])
        return cls(encoded.tobytes(), "image/jpeg", alt, caption)

    @classmethod
    def from_chart(
        cls, plot: Callable[[Theme], bytes], *, alt: str = "", caption: str = ""
    ) -> "Picture":
        """Draws an SVG for light screens and one for dark ones.

        Args:
            plot: draws the chart for a theme.
            alt: for readers who do not see it; the caption where there is none.
            caption: below it.
        """
        return cls(plot("light"), "image/svg+xml", alt or caption, caption, plot("dark"))


@dataclass(frozen=True)
class SummaryFigure:
    """One of the few numbers that a reader should see first."""

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under a header; the first column is read as the row's name, the others as numbers.

    With ``prose`` the others are sentences.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: bool = False


@dataclass(frozen=True)
class Section:
    """A heading with any of: paragraphs, pictures in a grid, a table, shell commands."""

    title: str
    paragraphs: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    table: Table | None = None
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """The whole page, top to bottom; with ``contents``, a list of links to the sections."""

    title: str
    lead: str
    figures: Sequence[SummaryFigure]
    sections: Sequence[Section]
    footer: str = ""
    contents: bool = False


def write_report(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes the page; its folder is made, and a reader never finds half a page.

    Raises:
        UserError: the file cannot be written.
    """
    page = render_report(report).encode("utf-8")
    write_atomically(path, lambda stream: stream.write(page))


def render_report(report: Report) -> str:
    """Returns the page as a string of HTML."""
    figures = "".join(map(_render_figure, report.figures))
    names = _name_sections(report.sections)
    sections = "\n".join(map(_render_section, report.sections, names))
    footer = f"<footer>{escape(report.footer)}</footer>" if report.footer else ""
    return _PAGE.format(
        title=escape(report.title),
        style=STYLE,
        lead=escape(report.lead),
        figures=f'<dl class="figures">{figures}</dl>' if figures else "",
        contents=_render_contents(report.sections, names) if report.contents else "",
        sections=sections,
        footer=footer,
    )


def _name_sections(sections: Sequence[Section]) -> list[str]:
    """Returns an anchor for each section, no two alike."""
    names: list[str] = []
    for section in sections:
        name = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        names.append(f"{name}-{len(names)}" if name in names else name)
    return names


def _render_contents(sections: Sequence[Section], names: Sequence[str]) -> str:
    links = "".join(
        f'<li><a href="#{name}">{escape(section.title)}</a></li>'
        for section, name in zip(sections, names, strict=True)
    )
    return f'<nav aria-label="Contents"><ol>{links}</ol></nav>'


def _render_figure(figure: SummaryFigure) -> str:
    note = f'<dd class="note">{escape(figure.note)}</dd>' if figure.note else ""
    return (
        f"<div><dt>{escape(figure.label)}</dt>"
        f'<dd class="value">{escape(figure.value)}</dd>{note}</div>'
    )


def _render_section(section: Section, name: str) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.paragraphs]
    if section.pictures:
        parts.append(f'<div class="grid">{"".join(map(_render_picture, section.pictures))}</div>')
    if section.table:
        parts.append(_render_table(section.table))
    if section.commands:
        parts.append(f"<pre><code>{escape(chr(10).join(section.commands))}</code></pre>")
    return f'<section id="{name}">{"".join(parts)}</section>'


def _render_picture(picture: Picture) -> str:
    source = ""
    if picture.dark is not None:
        uri = _data_uri(picture.dark, picture.media_type)
        source = f'<source media="(prefers-color-scheme: dark)" srcset="{uri}">'
    uri = _data_uri(picture.content, picture.media_type)
    size = _measure(picture)
    # The browser keeps the place free before the picture is decoded: nothing jumps.
    lengths = f' width="{size[0]}" height="{size[1]}"' if size else ""
    full = f' style="--full:{_full_width(picture, size[0])}px"' if size else ""
    image = f'<img src="{uri}" alt="{escape(picture.alt)}"{lengths}{full}>'
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
    kind = ' class="wide"' if size and _is_wide(picture, *size) else ""
    # A tap shows every pixel, and one more the whole picture: a box that is ticked needs no script.
    switch = '<input type="checkbox" aria-label="In full size">'
    return (
        f'<figure{kind}><div class="pan"><label>{switch}<picture>{source}{image}</picture></label>'
        f"</div>{caption}</figure>"
    )


def _full_width(picture: Picture, width: int) -> int:
    """Returns the pixels at which letters can be read: a chart's, on a phone, at twice its size."""
    return 2 * width if picture.media_type == "image/svg+xml" else width


def _is_wide(picture: Picture, width: int, height: int) -> bool:
    is_sheet = picture.media_type != "image/svg+xml" and width > _SHEET
    return is_sheet or width > _WIDE * height


def _measure(picture: Picture) -> tuple[int, int] | None:
    """Returns width and height, in pixels or, of a drawing, in its own units."""
    if picture.media_type == "image/svg+xml":
        head = picture.content[:4096].decode("utf-8", errors="replace")
        box = re.search(r'viewBox="\S+ \S+ ([\d.]+) ([\d.]+)"', head)
        return (round(float(box[1])), round(float(box[2]))) if box else None
    try:
        with Image.open(io.BytesIO(picture.content)) as image:
            return image.size
    except UnidentifiedImageError:
        return None


def _render_table(table: Table) -> str:
    columns = [_is_of_words(column) for column in zip(*table.rows, strict=False)]
    kinds = [' class="words"' if words and not table.prose else "" for words in columns]
    kinds += [""] * (len(table.header) - len(kinds))
    head = "".join(
        f'<th scope="col"{kind}>{escape(cell)}</th>'
        for cell, kind in zip(table.header, kinds, strict=False)
    )
    rows = []
    for name, *cells in table.rows:
        numbers = "".join(
            f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(cells, kinds[1:], strict=False)
        )
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{numbers}</tr>')
    body = "".join(rows)
    kind = ' class="prose"' if table.prose else ""
    return (
        f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _is_of_words(cells: Sequence[str]) -> bool:
    return not any(re.match(r"[-\u2212+]?\.?\d", cell) for cell in cells)


def _data_uri(content: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header><h1>{title}</h1><p class="lead">{lead}</p></header>
{figures}
{contents}
{sections}
{footer}
</main>
</body>
</html>
"""

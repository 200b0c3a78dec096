# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A report as one HTML file: pictures inside it, no scripts, nothing fetched from anywhere.

It opens by double click, reads well on a phone and on paper, and follows the reader's choice of
a light or a dark screen. All text is escaped.
"""

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from qbheat_det.errors import UserError


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


@dataclass(frozen=True)
class SummaryFigure:
    """One of the few numbers that a reader should see first."""

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under a header; the first column is read as the row's name, the others as numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


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
    """The whole page, top to bottom."""

    title: str
    lead: str
    figures: Sequence[SummaryFigure]
    sections: Sequence[Section]
    footer: str = ""


def write_report(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes the page; its folder is made, and a reader never finds half a page.

    Raises:
        UserError: the file cannot be written.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(render_report(report), encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        raise UserError(f"cannot write '{target}': {error.strerror}") from error


def render_report(report: Report) -> str:
    """Returns the page as a string of HTML."""
    figures = "".join(map(_render_figure, report.figures))
    sections = "\n".join(map(_render_section, report.sections))
    footer = f"<footer>{escape(report.footer)}</footer>" if report.footer else ""
    return _PAGE.format(
        title=escape(report.title),
        style=_STYLE,
        lead=escape(report.lead),
        figures=f'<dl class="figures">{figures}</dl>' if figures else "",
        sections=sections,
        footer=footer,
    )


def _render_figure(figure: SummaryFigure) -> str:
    note = f'<dd class="note">{escape(figure.note)}</dd>' if figure.note else ""
    return (
        f"<div><dt>{escape(figure.label)}</dt>"
        f'<dd class="value">{escape(figure.value)}</dd>{note}</div>'
    )


def _render_section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.paragraphs]
    if section.pictures:
        parts.append(f'<div class="grid">{"".join(map(_render_picture, section.pictures))}</div>')
    if section.table:
        parts.append(_render_table(section.table))
    if section.commands:
        parts.append(f"<pre><code>{escape(chr(10).join(section.commands))}</code></pre>")
    return f"<section>{''.join(parts)}</section>"


def _render_picture(picture: Picture) -> str:
    source = ""
    if picture.dark is not None:
        uri = _data_uri(picture.dark, picture.media_type)
        source = f'<source media="(prefers-color-scheme: dark)" srcset="{uri}">'
    uri = _data_uri(picture.content, picture.media_type)
    image = f'<img src="{uri}" alt="{escape(picture.alt)}">'
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
    return f"<figure><picture>{source}{image}</picture>{caption}</figure>"


def _render_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = []
    for name, *cells in table.rows:
        numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{numbers}</tr>')
    body = "".join(rows)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


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
{sections}
{footer}
</main>
</body>
</html>
"""

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1c1e21; --quiet: #63676e;
  --line: #e4e4e1; --accent: #1f6feb;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121316; --card: #1a1c20; --ink: #e8e9eb; --quiet: #9aa0a8;
    --line: #2c2f35; --accent: #6ea8fe;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  -webkit-text-size-adjust: 100%;
}
main { max-width: 70rem; margin: 0 auto; padding: clamp(1.5rem, 5vw, 4rem) clamp(1rem, 4vw, 2rem); }
h1 {
  margin: 0; font-size: clamp(1.7rem, 4.5vw, 2.4rem); line-height: 1.2; font-weight: 650;
  letter-spacing: -0.02em; text-wrap: balance;
}
h2 { margin: 0 0 0.75rem; font-size: 1.3rem; font-weight: 620; letter-spacing: -0.01em; }
p { margin: 0 0 1rem; max-width: 44rem; }
.lead { margin-top: 0.75rem; color: var(--quiet); font-size: 1.1rem; }
.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr));
  gap: 1px; margin: 2rem 0 0; overflow: hidden;
  background: var(--line); border: 1px solid var(--line); border-radius: 12px;
}
.figures div { padding: 1.1rem 1.25rem; background: var(--card); }
dt { color: var(--quiet); font-size: 0.85rem; }
dd { margin: 0; }
.value {
  font-size: 1.7rem; line-height: 1.3; font-weight: 640; letter-spacing: -0.02em;
  white-space: nowrap;
  font-variant-numeric: tabular-nums;
}
.note { color: var(--quiet); font-size: 0.8rem; }
section { margin-top: clamp(2.5rem, 6vw, 4rem); }
.grid {
  display: grid; gap: 1.25rem; margin: 1.25rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr));
}
figure {
  margin: 0; overflow: hidden; break-inside: avoid;
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
}
img { display: block; width: 100%; height: auto; }
figcaption { padding: 0.65rem 0.9rem; color: var(--quiet); font-size: 0.875rem; line-height: 1.45; }
.scroll { overflow-x: auto; margin: 1.25rem 0; }
table { border-collapse: collapse; min-width: min(100%, 24rem); font-size: 0.95rem; }
th, td {
  padding: 0.5rem 1.5rem 0.5rem 0; text-align: right; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums;
}
th:first-child { text-align: left; }
tr > :last-child { padding-right: 0; }
thead th { color: var(--quiet); font-size: 0.85rem; font-weight: 500; }
tbody th { font-weight: 500; }
pre {
  margin: 1.25rem 0; padding: 1rem 1.25rem; overflow-x: auto;
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  font: 0.875rem/1.7 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
}
footer {
  margin-top: clamp(2.5rem, 6vw, 4rem); padding-top: 1.25rem;
  border-top: 1px solid var(--line); color: var(--quiet); font-size: 0.875rem;
}
@media print { figure, pre, .figures { border-color: #ccc; } section { break-inside: auto; } }
"""

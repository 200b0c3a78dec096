# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reports as one HTML file: images inside it, no scripts, nothing loaded from the network.

The template ``page.html.j2`` escapes all text and has one column on a phone.
"""

import base64
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2

from qbheat_det.core.figures import Image, Table
from qbheat_det.core.files import write_atomically


@dataclass(frozen=True)
class Section:
    """A heading with any of: paragraphs, images, a table, lines of code."""

    title: str
    paragraphs: Sequence[str] = ()
    images: Sequence[Image] = ()
    table: Table | None = None
    code: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """The page from top to bottom; with more than three sections, links to them come first."""

    title: str
    lead: str
    sections: Sequence[Section]
    footer: str


def write_page(page: Page, path: str | os.PathLike[str]) -> None:
    """Writes the page atomically; its folder is made where it is missing.

    Raises:
        UserError: the file cannot be written.
    """
    # Names of files may hold bytes that are no text.
    content = _load_template().render(page=page).encode(errors="backslashreplace")
    write_atomically(path, lambda stream: stream.write(content))


@functools.cache
def _load_template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."), autoescape=True, trim_blocks=True
    )
    environment.filters |= {"data_uri": _to_data_uri, "text_columns": _find_text_columns}
    return environment.get_template("page.html.j2")


def _to_data_uri(image: Image) -> str:
    return f"data:{image.media_type};base64,{base64.b64encode(image.content).decode()}"


def _find_text_columns(table: Table) -> set[int]:
    """Returns the columns without a number, which are aligned on the left."""
    columns = zip(*table.rows, strict=True)
    return {
        index
        for index, cells in enumerate(columns)
        if not any(re.match(r"[-\u2212+]?\.?\d", cell) for cell in cells)
    }

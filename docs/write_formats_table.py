# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writes the formats that ``--data`` takes into docs/train.md.

usage: python -m docs.write_formats_table
"""

import re
import sys
import textwrap
from pathlib import Path

from qbheat_det.data.datasets.formats import FORMATS
from qbheat_det.data.datasets.formats.base import Format

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "train.md"
_BEGIN = "<!-- begin: docs/write_formats_table.py -->"
_END = "<!-- end -->"


def update(text: str) -> str:
    """Returns the content of docs/train.md with the list of formats between the marks."""
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not (begin and end):
        sys.exit(f"{PAGE} has no section between '{_BEGIN}' and '{_END}'")
    items = "\n".join(map(describe_format, FORMATS.values()))
    return f"{head}{begin}\n\n{items}\n\n{end}{tail}"


def describe_format(row: Format) -> str:
    """Returns an item of a Markdown list, in lines of at most 100 columns."""
    text = f"- **{row.title}**: {row.data}. Images: {row.images}."
    # A line does not end within code, so spaces in code are replaced while lines are made.
    text = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.fill(
        text, width=100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ")


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text("utf-8")), "utf-8")

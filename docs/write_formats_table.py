# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writes the formats that ``--data`` takes into docs/train.md.

usage: python -m docs.write_formats_table
"""

import sys
from pathlib import Path

from qbheat_det.data.datasets.formats import FORMATS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "train.md"
_BEGIN = "<!-- begin: docs/write_formats_table.py -->"
_END = "<!-- end -->"


def update(text: str) -> str:
    """Returns the content of docs/train.md with the table of formats between the marks."""
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not (begin and end):
        sys.exit(f"{PAGE} has no section between '{_BEGIN}' and '{_END}'")
    rows = [("format", "value of `--data`", "location of the images"), ("---", "---", "---")]
    rows += [(row.title, row.data, row.images) for row in FORMATS.values()]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    return f"{head}{begin}\n\n{table}\n\n{end}{tail}"


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text("utf-8")), "utf-8")

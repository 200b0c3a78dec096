# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writes the entries of the package's model zoo into MODEL_ZOO.md.

usage: python -m docs.write_zoo_table
"""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from qbheat_det.config import get_config_path
from qbheat_det.model_zoo import Metric, ZooEntry, index, list_entries, sources

ROOT = Path(__file__).resolve().parents[1]
ZOO_FILE = ROOT / "MODEL_ZOO.md"
_BEGIN = "<!-- begin: docs/write_zoo_table.py -->"
_END = "<!-- end -->"
_HEADERS = ("name", "task", "params", "multiply-adds", "file")
_METRIC_HEADERS = ("name", "metrics")
_NOTES = """\
Parameters are counted over the whole file. Multiply-adds include convolutions, linear layers and
attention, for one image of the stated size. For pre-trained models, only the backbone is counted.
Metrics are measured with these files in half precision, unless a note below says otherwise.
"Shipped" files (40 MB at most) are in the repository and in the wheel, so their names work without
a network. Tests check that code and weights agree."""


def update(text: str) -> str:
    """Returns the content of MODEL_ZOO.md with the entries of the index between the marks."""
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not (begin and end):
        sys.exit(f"MODEL_ZOO.md has no section between '{_BEGIN}' and '{_END}'")
    return f"{head}{begin}\n\n{render_entries(list_entries())}\n\n{end}{tail}"


def render_entries(entries: Sequence[ZooEntry]) -> str:
    """Returns Markdown: tables of the entries and their metrics, then a section for each entry."""
    entries = sorted(entries, key=lambda entry: (index.TASKS.index(entry.task), entry.name))
    files = render_table(_HEADERS, [render_row(entry) for entry in entries])
    measured = [entry for entry in entries if entry.metrics]
    metrics = render_table(_METRIC_HEADERS, [render_metrics(entry) for entry in measured])
    return "\n\n".join([files, metrics, _NOTES, *map(describe_entry, entries)])


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(c.replace('|', '/') for c in line)} |" for line in lines)


def describe_entry(entry: ZooEntry) -> str:
    """Returns a section about an entry; raises a ``UserError`` if its recipe is missing."""
    get_config_path(entry.config)
    made = f"Made: {entry.date}, at commit `{entry.commit}`"
    if entry.distribution:
        made = f"Converted when fetched, from `{entry.distribution.requirement}` of Python's index"
    if entry.encoder:
        size = f"{entry.stored.size / 1e6:.1f} MB"
        made += f". Stored without the encoder of `{entry.encoder.name}`: {size}"
    hashed = "SHA-256 of its tensors" if entry.is_made else "SHA-256"
    lines = (
        f"Recipe: [{entry.config}](configs/{entry.config})",
        f"Data: {entry.data} (licence: {entry.data_licence})",
        f"Weights: `{entry.file}`, {entry.size / 1e6:.1f} MB, licence {entry.licence}, {hashed} "
        f"`{entry.sha256}`",
        made,
        *map(format_metric, entry.metrics),
    )
    items = "\n".join(wrap(f"- {line}", indent="  ") for line in lines)
    command = f"```sh\n{entry.command}\n```"
    return f"### {entry.name}\n\n{wrap(entry.summary)}\n\n{items}\n\n{command}"


def wrap(text: str, *, indent: str = "") -> str:
    """Returns text in lines of at most 100 columns, all but the first one indented."""
    return textwrap.fill(
        text, width=100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def format_metric(metric: Metric) -> str:
    """Returns text such as "AP 21.3 % on Aquarium val (±0.4, over 3 seeds; at 512)"."""
    value = " ".join(filter(None, [metric.name, f"{metric.value:g}", metric.unit]))
    text = f"{value} on {metric.data}"
    notes = "; ".join(filter(None, [metric.spread, metric.note]))
    if notes:
        text += f" ({notes})"
    return text


def render_row(entry: ZooEntry) -> Sequence[str]:
    """Returns the cells of an entry, in the order of ``_HEADERS``."""
    # GitHub removes dots and slashes from the anchors of headings.
    anchor = "".join(letter for letter in entry.name.lower() if letter.isalnum() or letter in "-_")
    size = f"{entry.stored.size / 1e6:.1f} MB"
    if entry.encoder:
        size += f" + `{entry.encoder.name}`"
    if (sources.SHIPPED / entry.stored.file).is_file():
        size += ", shipped"
    return (
        f"[`{entry.name}`](#{anchor})",
        entry.task,
        f"{entry.num_params / 1e6:.1f} M",
        f"{entry.madds / 1e9:.2f} G at {entry.madds_input[0]}x{entry.madds_input[1]}",
        size,
    )


def render_metrics(entry: ZooEntry) -> Sequence[str]:
    """Returns the cells of an entry, in the order of ``_METRIC_HEADERS``."""
    return (f"`{entry.name}`", "; ".join(map(str, entry.metrics)))


if __name__ == "__main__":
    ZOO_FILE.write_text(update(ZOO_FILE.read_text("utf-8")), encoding="utf-8")
    print(ZOO_FILE.relative_to(ROOT))

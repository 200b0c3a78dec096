# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The entries of the model zoo as Markdown, for ``MODEL_ZOO.md``."""

from collections.abc import Sequence
from pathlib import Path

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

from . import index, sources
from .index import Metric, ZooEntry

ZOO_FILE = Path(__file__).resolve().parents[2] / "MODEL_ZOO.md"
_BEGIN, _END = "<!-- begin: qbheat zoo table -->", "<!-- end -->"
_HEADERS = ("name", "task", "metrics", "params", "multiply-adds", "file")
_NOTES = """\
Parameters are those of the whole file. Multiply-adds are of convolutions, linear layers and
attention on one image of the stated size; of pre-trained models, those of the backbone on it.
Metrics are of the files as they are, in half precision, unless a note below says otherwise.
"Shipped" files, 40 MB at most, are in the repository and in the wheel: their names work without a
network, and `qbheat zoo verify` and the tests check that code and weights agree."""


def write_table(path: Path = ZOO_FILE) -> Path:
    """Replaces the entries in ``MODEL_ZOO.md`` by those of the package's index; returns its path.

    Raises:
        UserError: there is no such file with the marks of the section.
    """
    try:
        text = path.read_text(encoding="utf-8")
        head, begin, rest = text.partition(_BEGIN)
        _, end, tail = rest.partition(_END)
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from error
    if not (begin and end):
        raise UserError(f"'{path}' has no section between '{_BEGIN}' and '{_END}'")
    section = render_entries(index.load_index())
    write_atomically(path, f"{head}{begin}\n\n{section}\n\n{end}{tail}".encode())
    return path


def render_entries(entries: Sequence[ZooEntry]) -> str:
    """Returns a table of the entries, then a section for each."""
    entries = sorted(entries, key=lambda entry: (index.TASKS.index(entry.task), entry.name))
    lines = [_HEADERS, ["---"] * len(_HEADERS), *map(_render_row, entries)]
    table = "\n".join(f"| {' | '.join(c.replace('|', '/') for c in line)} |" for line in lines)
    parts = [table, _NOTES]
    for entry in entries:
        get_config_path(entry.config)  # which must exist
        parts.append(_describe_entry(entry))
    return "\n\n".join(parts)


def _describe_entry(entry: ZooEntry) -> str:
    """Returns a section with all that the index has about an entry."""
    made = f"Made: {entry.date}, at commit `{entry.commit}`"
    if entry.distribution:
        made = f"Converted when fetched, from `{entry.distribution.requirement}` of Python's index"
    if entry.encoder:
        stored = entry.stored
        made += f". Stored without the encoder of `{entry.encoder.name}`: {stored.size:,} bytes"
    lines = (
        f"Recipe: [{entry.config}](configs/{entry.config})",
        f"Data: {entry.data} (licence: {entry.data_licence})",
        f"Weights: `{entry.file}`, {entry.size:,} bytes, licence {entry.licence}, SHA-256 "
        f"`{entry.sha256}`",
        made,
        *map(_format_metric, entry.metrics),
    )
    items = "\n".join(f"- {line}" for line in lines)
    command = f"```sh\n{entry.command}\n```"
    return f"### {entry.name}\n\n{entry.summary}\n\n{items}\n\n{command}"


def _format_metric(metric: Metric) -> str:
    """Returns such as "AP 21.3 % on Aquarium val (±0.4, over 3 seeds; at 512)"."""
    notes = "; ".join(filter(None, [metric.spread, metric.note]))
    value = " ".join(filter(None, [metric.name, f"{metric.value:g}", metric.unit]))
    return f"{value} on {metric.data}{f' ({notes})' if notes else ''}"


def _render_row(entry: ZooEntry) -> Sequence[str]:
    # GitHub's anchors of headings have no dots and slashes.
    anchor = "".join(letter for letter in entry.name.lower() if letter.isalnum() or letter in "-_")
    stored = entry.stored
    shipped = ", shipped" if (sources.SHIPPED / stored.file).is_file() else ""
    size = f"{stored.size / 1e6:.1f} MB"
    if entry.encoder:
        size += f" + `{entry.encoder.name}`"
    return (
        f"[`{entry.name}`](#{anchor})",
        entry.task,
        "; ".join(map(str, entry.metrics)) or "—",
        f"{entry.num_params / 1e6:.1f} M",
        f"{entry.madds / 1e9:.2f} G at {entry.madds_input[0]}x{entry.madds_input[1]}",
        f"{size}{shipped}",
    )

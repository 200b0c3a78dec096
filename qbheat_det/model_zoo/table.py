# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writes ``MODEL_ZOO.md``: the entries with their metrics, and the paper's results as targets."""

import re
from collections.abc import Sequence
from pathlib import Path

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

from . import index, sources
from .index import Metric, ZooEntry
from .paper_targets import TARGETS, TargetTable

_NONE = "—"
_SPREAD = re.compile(r"±\s*(\d+(?:\.\d+)?)(?:[,;]?\s+(.*))?")
_CHECKOUT = Path(__file__).resolve().parents[2]
_HEAD = """\
# Model zoo

<!-- Made by `python tools/zoo.py table` from the index; edit that instead. -->

Nothing here has been pre-trained on ImageNet or trained on COCO in full: these models are trained
on small data, and are small. Use a name wherever weights are taken, as `qbheat://NAME`; list, fetch
and verify with `tools/zoo.py` ([docs/zoo.md](docs/zoo.md)).

## Entries"""
_COSTS = """\
Parameters are those of the whole file. Multiply-adds are of convolutions, linear layers and
attention on one image of the stated size; of pre-trained models, those of the backbone on it.
Metrics are of the files as they are, in half precision, unless a note below says otherwise.
"Shipped" files, 40 MB at most, are in the repository and in the wheel: their names work without a
network, and `tools/zoo.py verify` and the tests check that code and weights agree."""
_TARGETS = """\
## Results of the paper

The tables below have the paper's results as targets, each beside the config that is meant to reach
it. "—" under "ours" means that no weights here were measured on that line's data. What else has
been trained here is in [docs/results.md](docs/results.md)."""


def render_zoo(entries: Sequence[ZooEntry]) -> str:
    """Returns the text of ``MODEL_ZOO.md`` for the entries of an index.

    Raises:
        UserError: an entry or a target names a config that does not exist.
    """
    entries = sorted(entries, key=lambda entry: (index.TASKS.index(entry.task), entry.name))
    parts = [_HEAD, _render_overview(entries), _COSTS]
    for entry in entries:
        get_config_path(entry.config)
        link = f"[{entry.config}](configs/{entry.config})"
        parts.append(describe_entry(entry, "###", recipe=link))
    parts.append(_TARGETS)
    for target in TARGETS:
        parts += [f"### {target.title}", *filter(None, [target.note])]
        parts.append(_render_target(target, entries))
    return "\n\n".join(parts) + "\n"


def write_zoo(path: Path | None = None) -> Path:
    """Writes the file from the package's index; returns its path.

    Raises:
        UserError: the index is invalid, or this is no checkout and no path is given.
    """
    if path is None and not (_CHECKOUT / "setup.py").is_file():
        raise UserError("MODEL_ZOO.md is a file of a checkout: name another one with --output")
    path = path or _CHECKOUT / "MODEL_ZOO.md"
    text = render_zoo(index.load_index())
    write_atomically(path, lambda stream: stream.write(text.encode()))
    return path


def describe_entry(entry: ZooEntry, level: str, *, recipe: str) -> str:
    """Returns a section in Markdown with all that the index has about an entry."""
    height, width = entry.madds_input
    # Longer than any fence inside the command.
    ticks = "`" * (max(map(len, re.findall("`{3,}", entry.command)), default=2) + 1)
    lines = [
        f"- Recipe: {recipe}",
        f"- Data: {entry.data} (licence: {entry.data_licence})",
        f"- Weights: `{entry.file}`, {entry.size:,} bytes, licence {entry.licence}, SHA-256 "
        f"`{entry.sha256}`",
        f"- Parameters: {entry.num_params / 1e6:.1f} M; multiply-adds: {entry.madds / 1e9:.2f} G "
        f"at {height}x{width}",
        f"- Made: {entry.date}, at commit `{entry.commit}`",
        *[f"- {format_metric(metric)}" for metric in entry.metrics],
    ]
    command = f"{ticks}sh\n{entry.command}\n{ticks}"
    return "\n\n".join([f"{level} {entry.name}", entry.summary, "\n".join(lines), command])


def format_metric(metric: Metric) -> str:
    """Returns such as "AP 21.3 ± 0.4 % on Aquarium val (±: over 3 seeds; at 512)"."""
    _, rest = _split_spread(metric)
    notes = "; ".join(filter(None, [rest, metric.note]))
    end = f" ({notes})" if notes else ""
    return f"{metric.name} {_format_value(metric)} on {metric.data}{end}"


def format_briefly(metric: Metric) -> str:
    """Returns such as "AP 21.3 ± 0.4 %", per cent to one decimal."""
    return f"{metric.name} {_format_value(metric, '.1f' if metric.unit == '%' else 'g')}"


def _format_value(metric: Metric, form: str = "g") -> str:
    spread, _ = _split_spread(metric)
    return " ".join(filter(None, [format(metric.value, form), spread, metric.unit]))


def _split_spread(metric: Metric) -> tuple[str, str]:
    """Splits "±0.4, over 3 seeds" into "± 0.4" and "±: over 3 seeds"."""
    match = _SPREAD.fullmatch(metric.spread)
    if match is None:
        return "", f"spread: {metric.spread}" if metric.spread else ""
    return f"± {match[1]}", f"±: {match[2]}" if match[2] else ""


def _link(name: str) -> str:
    # GitHub's anchors of headings have no dots and slashes.
    anchor = "".join(letter for letter in name.lower() if letter.isalnum() or letter in "-_ ")
    return f"(#{anchor})"


def _render_overview(entries: Sequence[ZooEntry]) -> str:
    headers = ("name", "task", "metrics", "params", "multiply-adds", "file")
    rows = []
    for entry in entries:
        shipped = ", shipped" if (sources.SHIPPED / entry.file).is_file() else ""
        rows.append(
            (
                f"[`{entry.name}`]{_link(entry.name)}",
                entry.task,
                "; ".join(map(format_briefly, entry.metrics)) or _NONE,
                f"{entry.num_params / 1e6:.1f} M",
                f"{entry.madds / 1e9:.2f} G at {entry.madds_input[0]}x{entry.madds_input[1]}",
                f"{entry.size / 1e6:.1f} MB{shipped}",
            )
        )
    return _render_table(headers, rows)


def _render_target(target: TargetTable, entries: Sequence[ZooEntry]) -> str:
    rows = []
    for prefix, config, numbers in target.rows:
        get_config_path(f"{config}.yaml")
        link = f"{prefix}[{config.rpartition('/')[2]}](configs/{config}.yaml)"
        # Only metrics of weights trained by that config and measured on that data.
        ours = [
            f"{_format_value(metric)} ([{entry.name}]{_link(entry.name)})"
            for entry in entries
            for metric in entry.metrics
            if (entry.config, metric.name) == (f"{config}.yaml", target.metric)
            and metric.data.startswith(target.data)
        ]
        cells = [number or _NONE for number in numbers]
        rows.append((link, *cells, "; ".join(ours) or _NONE))
    return _render_table(("config", *target.columns, "ours"), rows)


def _render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(c.replace('|', '/') for c in line)} |" for line in (headers, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(headers), *lines[1:]])

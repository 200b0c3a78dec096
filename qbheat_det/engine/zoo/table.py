# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``MODEL_ZOO.md``: what there is with its figures, and the paper's figures as targets."""

import re
from collections.abc import Sequence
from pathlib import Path

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.model_zoo import index, places
from qbheat_det.model_zoo.index import Figure, ZooEntry

from .paper_targets import TARGETS, TargetTable

_NONE = "—"
_SPREAD = re.compile(r"±\s*(\d+(?:\.\d+)?)(?:[,;]?\s+(.*))?")
_CHECKOUT = Path(__file__).resolve().parents[3]
_MADE_BY = "<!-- Made by `python tools/zoo.py table` from the index; edit that instead. -->"
_NOTHING = (
    "No weights are published yet: nothing has been pre-trained on ImageNet or trained on COCO in "
    "full with this package."
)
_INTRO = """\
Nothing here has been pre-trained on ImageNet or trained on COCO in full: what follows was trained
on small data, and is small. Use a name wherever weights are taken, as `qbheat://NAME`; list, fetch
and verify with `tools/zoo.py` ([docs/zoo.md](docs/zoo.md))."""
_COSTS = """\
Parameters are those of the whole file. Multiply-adds are of convolutions, linear layers and
attention on one image of the stated size; of pre-trained models, those of the backbone on it.
Figures are of the files as they are, in half precision, unless a note below says otherwise.
"Shipped" files, 40 MB at most, are in the repository and in the wheel: a name then works without a
network, and tests and `tools/zoo.py verify` hold code and weights together."""
_TARGETS = """\
The tables below have the paper's figures as targets, each beside the config that is meant to reach
it. "—" under "ours" says that no weights here were measured on that line's data."""
_RESULTS = "What else has been trained here is in [docs/results.md](docs/results.md)."


def render_zoo(entries: Sequence[ZooEntry]) -> str:
    """Returns the whole of ``MODEL_ZOO.md``.

    Args:
        entries: of the package's index.

    Raises:
        UserError: an entry or a target names a config that is not there.
    """
    entries = sorted(entries, key=lambda entry: (index.TASKS.index(entry.task), entry.name))
    for entry in entries:
        get_config_path(entry.config)
    parts = ["# Model zoo", _MADE_BY]
    if entries:
        parts += [_INTRO, "## What there is", _overview(entries), _COSTS]
        parts += [_describe(entry) for entry in entries]
        parts += ["## What the paper has", f"{_TARGETS} {_RESULTS}"]
    else:
        parts += [_NOTHING, _RESULTS, _TARGETS]
    level = "###" if entries else "##"
    for target in TARGETS:
        parts += [f"{level} {target.title}", *filter(None, [target.note]), _table(target, entries)]
    return "\n\n".join(parts) + "\n"


def write_zoo(path: Path | None = None) -> Path:
    """Writes the file from the package's index; returns its path.

    Raises:
        UserError: the index is not sound, or this is no checkout and no path is given.
    """
    if path is None and not (_CHECKOUT / "setup.py").is_file():
        raise UserError("MODEL_ZOO.md is a file of a checkout: name another one with --output")
    path = path or _CHECKOUT / "MODEL_ZOO.md"
    text = render_zoo(index.load_index())
    write_atomically(path, lambda stream: stream.write(text.encode()))
    return path


def format_figure(figure: Figure) -> str:
    """Returns all of a figure: "AP 21.3 ± 0.4 % on Aquarium val (±: over 3 seeds; at 512)"."""
    _, rest = _split_spread(figure)
    notes = "; ".join(filter(None, [rest, figure.note]))
    end = f" ({notes})" if notes else ""
    return f"{figure.metric} {format_value(figure)} on {figure.data}{end}"


def format_briefly(figure: Figure) -> str:
    """Returns what stands in an overview: "AP 21.3 ± 0.4 %", per cent to one decimal."""
    return f"{figure.metric} {format_value(figure, '.1f' if figure.unit == '%' else 'g')}"


def format_value(figure: Figure, form: str = "g") -> str:
    """Returns the number of a figure with its spread and unit."""
    spread, _ = _split_spread(figure)
    return " ".join(filter(None, [format(figure.value, form), spread, figure.unit]))


def fence(command: str) -> list[str]:
    """Returns the lines of a block of shell in Markdown, which no line of it can end."""
    ticks = max(map(len, re.findall("`{3,}", command)), default=2) + 1
    return ["`" * ticks + "sh", command, "`" * ticks]


def _split_spread(figure: Figure) -> tuple[str, str]:
    """ "±0.4, over 3 seeds" as "± 0.4" beside the number and "±: over 3 seeds" below."""
    match = _SPREAD.fullmatch(figure.spread)
    if match is None:
        return "", f"spread: {figure.spread}" if figure.spread else ""
    return f"± {match[1]}", f"±: {match[2]}" if match[2] else ""


def _overview(entries: Sequence[ZooEntry]) -> str:
    headers = ("name", "task", "figures", "params", "multiply-adds", "file")
    rows = [
        (
            f"[`{entry.name}`](#{_anchor(entry.name)})",
            entry.task,
            "; ".join(map(format_briefly, entry.figures)) or _NONE,
            f"{entry.num_params / 1e6:.1f} M",
            f"{entry.madds / 1e9:.2f} G at {entry.madds_input[0]}x{entry.madds_input[1]}",
            f"{entry.size / 1e6:.1f} MB{_where(entry)}",
        )
        for entry in entries
    ]
    return _markdown(headers, rows)


def _where(entry: ZooEntry) -> str:
    return ", shipped" if (places.SHIPPED / entry.file).is_file() else ""


def _anchor(name: str) -> str:
    # As GitHub makes them of headings: dots and slashes go.
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter in "-_ ")


def _describe(entry: ZooEntry) -> str:
    config = entry.config
    lines = [
        f"### {entry.name}",
        "",
        entry.summary,
        "",
        f"- Recipe: [{config}](configs/{config})",
        f"- Data: {entry.data} (licence: {entry.data_licence})",
        f"- Weights: `{entry.file}`, {entry.size:,} bytes, licence {entry.licence}, SHA-256 "
        f"`{entry.sha256}`",
        f"- Made: {entry.date}, at commit `{entry.commit[:12]}`",
        *[f"- {format_figure(figure)}" for figure in entry.figures],
        "",
        *fence(entry.command),
    ]
    return "\n".join(lines)


def _table(target: TargetTable, entries: Sequence[ZooEntry]) -> str:
    headers = ("config", *target.columns, "ours")
    rows = []
    for before, config, numbers in target.rows:
        get_config_path(f"{config}.yaml")
        link = f"{before}[{config.rpartition('/')[2]}](configs/{config}.yaml)"
        cells = [number or _NONE for number in numbers]
        rows.append((link, *cells, _ours(target, f"{config}.yaml", entries)))
    return _markdown(headers, rows)


def _ours(target: TargetTable, config: str, entries: Sequence[ZooEntry]) -> str:
    """Only what was trained by that config and measured on that data."""
    found = [
        f"{format_value(figure)} ([{entry.name}](#{_anchor(entry.name)}))"
        for entry in entries
        for figure in entry.figures
        if entry.config == config
        and figure.metric == target.metric
        and figure.data.startswith(target.data)
    ]
    return "; ".join(found) or _NONE


def _markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    text = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]
    text[1] = "|" + "---|" * len(headers)
    return "\n".join(text)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writes an HTML page with all figures of several runs, and the reasons for missing figures.

The page embeds its images, has no scripts, and loads nothing from the network. The template
``page.html.j2`` escapes all text.
"""

import base64
import contextlib
import functools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically
from qbheat_det.core.text import join_first

from . import load_figures
from .figures import Figure, Image, NotApplicable, Table, remove_figure, write_figure
from .run import FigureOptions, Run

logger = logging.getLogger(__name__)
_UNKNOWN = "unknown"
_NUMBER = re.compile(r"[-\u2212+]?\.?\d")  # the start of a number; U+2212 is the minus sign
_LEAD = (
    "Figures of trained models side by side. The folder beside this page has each image as a file, "
    "and the numbers behind it as JSON."
)


@dataclass(frozen=True)
class FigureResult:
    """A figure of a report, or the reason why it is missing.

    ``failed`` is True if drawing raised an error. It is False if the figure was drawn, does not
    apply to the runs, or is not drawn yet.
    """

    name: str
    figure: Figure | None = None
    reason: str = "not drawn: the report was interrupted or is still being written"
    failed: bool = False


def build_report(
    names: Sequence[str],
    runs: Sequence[Run],
    options: FigureOptions,
    keywords: Mapping[str, Mapping[str, Any]],
    *,
    output: Path,
    command: str,
    title: str = "",
    lead: str = _LEAD,
) -> list[FigureResult]:
    """Draws figures of all runs side by side, and rewrites the page after each figure.

    Images and JSON files are written to a folder with the name of the page. If a figure fails, the
    report continues with the next figure.

    Args:
        names: keys of ``load_figures()``, in the order of the page.
        runs: the runs to compare.
        options: options of all figures.
        keywords: keyword arguments of the figures' functions, by figure name.
        output: path of the page (``.html``).
        command: the command that rebuilds the page, which is printed on the page.
        title: title of the page, by default the labels of the runs.
        lead: first paragraph of the page.

    Returns:
        One result per name, in the order of ``names``.

    Raises:
        UserError: a file cannot be written. This is checked before the first figure is drawn.
    """
    folder = output.with_suffix("")
    results = {name: FigureResult(name) for name in names}
    title = title or join_first(run.label for run in runs)
    write = functools.partial(write_page, output, title, lead, describe_runs(runs), command=command)
    check_writable(folder / "curves.json")
    write(list(results.values()))
    for name in load_figures():
        remove_figure(name, folder)  # of an earlier report
    with tqdm(names, unit="figure", disable=None) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            result = _draw(name, runs, options, keywords.get(name, {}))
            results[name] = result
            if result.figure is not None:
                write_figure(result.figure, folder)
            write(list(results.values()))
    return list(results.values())


def _draw(
    name: str, runs: Sequence[Run], options: FigureOptions, keywords: Mapping[str, Any]
) -> FigureResult:
    """Draws a figure, or returns the reason why it cannot be drawn."""
    try:
        return FigureResult(name, load_figures()[name](runs, options, **keywords))
    except (NotApplicable, UserError) as error:
        return FigureResult(name, reason=str(error), failed=isinstance(error, UserError))
    except Exception as error:  # keep the figures that are already drawn
        logger.exception("figure '%s' failed", name)
        return FigureResult(name, reason=f"{type(error).__name__}: {error}", failed=True)


def describe_runs(runs: Iterable[Run]) -> Table:
    """Returns a table of the task, model, weights, steps and epochs of runs.

    A cell is "unknown" if the run's folder does not have the value.
    """
    rows = []
    for run in runs:
        last_record = max(run.metrics, key=lambda record: record["iteration"], default={})
        steps = _UNKNOWN
        if last_record:
            steps = f"{int(last_record['iteration']) + 1:,}"
        epochs = _UNKNOWN
        if "epoch" in last_record:
            epochs = f"{last_record['epoch']:.1f}"
        weights = _UNKNOWN
        with contextlib.suppress(NotApplicable, UserError):
            weights = run.weights.name
        task = _UNKNOWN
        model = _UNKNOWN
        backbone = _UNKNOWN
        with contextlib.suppress(NotApplicable, UserError):
            task = run.task.name
            model = run.cfg.MODEL.META_ARCHITECTURE
            backbone = run.cfg.MODEL.BACKBONE.NAME
        rows.append((run.label, task, model, backbone, weights, steps, epochs))
    return Table(("Run", "For", "Model", "Backbone", "Weights", "Steps", "Epochs"), rows)


def write_page(
    path: Path,
    title: str,
    lead: str,
    runs: Table,
    results: Sequence[FigureResult],
    *,
    command: str,
) -> None:
    """Writes all figures, the table of runs, and the reasons of missing figures."""
    sections = [result.figure for result in results if result.figure is not None]
    sections.append(Figure("runs", "Runs", table=runs))
    missing = [(result.name, result.reason) for result in results if result.figure is None]
    if missing:
        table = Table(("Figure", "Reason"), missing)
        sections.append(Figure("missing", "Missing figures", table=table))
    if len(runs.rows) == 1:
        summaries = [figure for figure in sections if figure.headline]
    else:
        summaries = []
    text = _load_template().render(
        title=title, lead=lead, summaries=summaries, sections=sections, command=command
    )
    # File names may contain bytes that are not valid text.
    write_atomically(path, text.encode(errors="backslashreplace"))


@functools.cache
def _load_template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."), autoescape=True, trim_blocks=True
    )
    environment.filters |= {
        "data_uri": _to_data_uri,
        "fit": _fit_phone,
        "text_columns": _find_text_columns,
    }
    return environment.get_template("page.html.j2")


def _to_data_uri(image: Image) -> str:
    return f"data:{image.media_type};base64,{base64.b64encode(image.content).decode()}"


def _fit_phone(table: Table) -> Table:
    """Returns the table, with rows and columns exchanged if it has more columns than rows.

    A phone has room for about three columns, and for any number of rows.
    """
    if len(table.rows) >= len(table.header) - 1:
        return table
    first_column, *columns = zip(table.header, *table.rows, strict=True)
    return Table(first_column, columns)


def _find_text_columns(table: Table) -> set[int]:
    """Returns the indices of the columns without numbers, which the page aligns to the left."""
    text_columns = set()
    for index, cells in enumerate(zip(*table.rows, strict=True)):
        if not any(_NUMBER.match(cell) for cell in cells):
            text_columns.add(index)
    return text_columns

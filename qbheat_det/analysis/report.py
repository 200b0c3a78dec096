# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One page with every figure of several runs, and the reason for each that is missing."""

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import (
    FIGURES,
    Figure,
    NotApplicable,
    Table,
    remove_figure,
    write_figure,
)
from qbheat_det.core.files import check_writable

from .figure import FigureOptions
from .page import Page, Section, write_page
from .run import Run
from .training_log import has_step

logger = logging.getLogger(__name__)
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class FigureResult:
    """A figure of a report, or the reason why it is missing; ``failed`` if that is an error."""

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
) -> list[FigureResult]:
    """Draws figures of all runs side by side; writes the page anew after each of them.

    Images and JSON go to the folder with the page's name. What fails costs one figure alone.

    Args:
        names: keys of ``FIGURES``, in the order of the page.
        runs: with different labels.
        options: of all figures.
        keywords: arguments of single figures, by name.
        output: the page, ``.html``; ``command`` makes it again.

    Raises:
        UserError: a file cannot be written, which is found before the first figure is drawn.
    """
    folder = output.with_suffix("")
    results = {name: FigureResult(name) for name in names}
    about = Section("Runs", table=describe_runs(runs))

    def write() -> None:
        write_page(_build_page(about, [run.label for run in runs], results.values(), command),
                   output)  # fmt: skip

    check_writable(folder / "curves.json")
    write()
    for name in FIGURES:  # of an earlier report
        remove_figure(name, folder)
    with tqdm(names, unit="figure") as bar:
        for name in bar:
            bar.set_postfix_str(name)
            results[name] = _draw(name, runs, options, keywords.get(name, {}))
            if (figure := results[name].figure) is not None:
                write_figure(figure, folder)
            write()
    return list(results.values())


def _draw(
    name: str, runs: Sequence[Run], options: FigureOptions, keywords: Mapping[str, Any]
) -> FigureResult:
    try:
        return FigureResult(name, FIGURES[name](runs, options, **keywords))
    except NotApplicable as reason:
        return FigureResult(name, reason=str(reason))
    except UserError as error:
        return FigureResult(name, reason=str(error), failed=True)
    except Exception as error:  # an hour of drawing must not be lost to one figure
        logger.exception("figure '%s' failed", name)
        return FigureResult(name, reason=f"{type(error).__name__}: {error}", failed=True)


def _build_page(
    about: Section, labels: Sequence[str], results: Iterable[FigureResult], command: str
) -> Page:
    sections, missing = [about], []
    for result in results:
        if (figure := result.figure) is not None:
            images = list(figure.images.values())
            sections.append(Section(figure.title, figure.explanation, images, figure.table))
        else:
            missing.append((result.name, result.reason))
    if missing:
        sections.append(Section("Missing figures", table=Table(("Figure", "Reason"), missing)))
    sections.append(Section("Command", code=[command]))
    return Page(
        title=", ".join(labels) if len(labels) < 4 else f"{len(labels)} runs",
        lead="Figures of trained models side by side. The folder beside this page has each image "
        "as a file, and the numbers behind it as JSON.",
        sections=sections,
        footer="Written by tools/report.py of qbheat_det.",
    )


def describe_runs(runs: Iterable[Run]) -> Table:
    """Returns model, weights and length of each run, as far as its files are there."""
    rows = []
    for run in runs:
        steps = [record for record in run.metrics if has_step(record)]
        last = max(steps, key=lambda record: record["iteration"], default={})
        number = f"{int(last['iteration']) + 1:,}" if last else _UNKNOWN
        epochs = f"{last['epoch']:.1f}" if "epoch" in last else _UNKNOWN
        weights = kind = model = backbone = _UNKNOWN
        with contextlib.suppress(NotApplicable, UserError):
            weights = run.weights.name
        with contextlib.suppress(NotApplicable, UserError):
            kind, model = run.kind, run.cfg.MODEL.META_ARCHITECTURE
            backbone = run.cfg.MODEL.BACKBONE.NAME
        rows.append((run.label, kind, model, backbone, weights, number, epochs))
    return Table(("Run", "For", "Model", "Backbone", "Weights", "Steps", "Epochs"), rows)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One page of many exhibits: the runs, what was seen of them, and what could not be seen."""

from collections.abc import Mapping, Sequence
from typing import Any

from .exhibit import Exhibit
from .html_report import Report, Section, SummaryFigure, Table

_COLUMNS = {
    "kind": "For",
    "model": "Model",
    "backbone": "Backbone",
    "weights": "Weights",
    "steps": "Steps",
    "epochs": "Epochs",
    "images": "Images seen",
}


def describe_exhibits(
    exhibits: Sequence[Exhibit],
    runs: Sequence[Mapping[str, Any]],
    missing: Sequence[tuple[str, str]],
    *,
    commands: Sequence[str] = (),
) -> Report:
    """Returns the page.

    Args:
        exhibits: a section each, in order.
        runs: of each run "label", and what else is known of it, see ``_COLUMNS``.
        missing: name and reason of what is not there.
        commands: the command that makes this page again.
    """
    pictures = sum(len(exhibit.pictures) for exhibit in exhibits)
    names = [str(run["label"]) for run in runs]
    sections = [
        _show_runs(runs),
        *(
            Section(
                exhibit.title,
                paragraphs=exhibit.explanation,
                pictures=list(exhibit.pictures.values()),
                table=exhibit.table,
            )
            for exhibit in exhibits
        ),
    ]
    if missing:
        sections.append(
            Section(
                "What is not here, and why",
                table=Table(("Not here", "Why"), _join_reasons(missing), prose=True),
            )
        )
    if commands:
        sections.append(Section("The same by hand", commands=commands))
    return Report(
        title=f"What {_join(names)} learned" if len(names) < 4 else "What these runs learned",
        lead="Pictures and figures of trained weights, side by side. The numbers behind each "
        "picture are in the folder beside this page, as JSON.",
        figures=[
            SummaryFigure(str(len(runs)), "Runs"),
            SummaryFigure(str(len(exhibits)), "Exhibits"),
            SummaryFigure(str(pictures), "Pictures"),
            SummaryFigure(str(len(missing)), "Left out", "with the reason, at the end"),
        ],
        sections=sections,
        footer="Written by tools/report.py of qbheat_det.",
        contents=True,
    )


def _show_runs(runs: Sequence[Mapping[str, Any]]) -> Section:
    known = [key for key in _COLUMNS if any(run.get(key) is not None for run in runs)]
    rows = [(str(run["label"]), *(_format(run.get(key)) for key in known)) for run in runs]
    faults = [f"{run['label']}: {run['fault']}." for run in runs if run.get("fault")]
    header = ("Run", *(_COLUMNS[key] for key in known))
    return Section("The runs", paragraphs=faults, table=Table(header, rows))


def _join_reasons(missing: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns each reason once, with all that it cost."""
    names: dict[str, list[str]] = {}
    for name, reason in missing:
        names.setdefault(reason, []).append(name)
    return [(", ".join(of), reason) for reason, of in names.items()]


def _format(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sight "spectrum": eigenvalues of A and B, their energies, and what controls show."""

import argparse
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.html_report import Picture
from qbheat_det.analysis.spectrum import RotatedControl, Spectrum, describe_models
from qbheat_det.analysis.spectrum_charts import (
    plot_eigenvalues,
    plot_energy_ratios,
    plot_spectrum,
)
from qbheat_det.analysis.spectrum_table import draw_untrained, summarize, tabulate
from qbheat_det.checkpoint import info_of
from qbheat_det.core.errors import UserError

from .flag_types import whole
from .linear_models import list_checkpoints, read_linear_models
from .options import SightOptions
from .refusal import NothingToSee
from .side_by_side import look_at_each
from .subject import Subject

logger = logging.getLogger(__name__)

CHECKPOINTS = 5
"""Of a run's folder, rows of Table 3, which has five."""
_HOW_TO_READ = (
    "Magnitudes of the eigenvalues of A and B, which carry features by z(x + Δx) = (I + Δx A) "
    "z(x), by size and at both scales; then each scale's magnitudes, divided by their sum, against "
    "the other's, where the paper (Fig. 7) finds the diagonal; then the eigenvalues in the complex "
    "plane.",
    "Two controls stand beside them. Untrained matrices, random ones of the same size, lie on the "
    "diagonal too and have E(A)/E(B) near 1 at both scales: only what differs from them was "
    "learned. Rotated ones have the learned singular values in random directions: what they "
    "share with the learned is due to size and rank.",
    "In the table, the energy E is the sum of the magnitudes (Eq. 7), and E(A)/E(B) at each scale "
    "is what Table 3 of the paper has. The commutator ‖AB - BA‖ / (‖A‖‖B‖) is 0 where the order of "
    "right and down makes no difference, as Eq. 3 takes it; the inverse error is 0 where left "
    "undoes right and up undoes down. The rank is the least of all matrices, the condition the "
    "greatest, all else a mean.",
)


@dataclass(frozen=True)
class Course:
    """How the spectrum of a run came about.

    Attributes:
        earlier: steps of training and the spectrum after them, rising.
        last: of the subject itself; None where its weights do not tell the steps.
        epoch: steps of one; nan where the run does not tell.
        left_out: a sentence for each checkpoint that has no row, and for want of epochs.
    """

    earlier: Sequence[tuple[int, Spectrum]]
    last: tuple[int, Spectrum] | None
    epoch: float
    left_out: Sequence[str] = ()

    @property
    def points(self) -> list[tuple[int, Spectrum]]:
        """All of them, rising."""
        return [*self.earlier, *([self.last] if self.last else [])]

    def rows(self) -> dict[str, Spectrum]:
        """Returns the earlier ones by the names of their rows."""
        return {
            f"step {steps:,}"
            if math.isnan(self.epoch)
            else f"epoch {steps / self.epoch:.3g}": found
            for steps, found in self.earlier
        }


@dataclass(frozen=True)
class _Described:
    """Of one subject: the spectrum, its controls by name, and how it came about."""

    learned: Spectrum
    controls: dict[str, Spectrum]
    course: Course


def add_spectrum_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the sight's flags."""
    parser.add_argument(
        "--checkpoints",
        type=whole(least=0),
        default=CHECKPOINTS,
        metavar="N",
        help="of the folder of a run, so many checkpoints besides the last weights, spread evenly "
        f"over its course, as rows of Table 3 (default: {CHECKPOINTS}; 0 for none)",
    )


def see_spectrum(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    """Draws the spectrum of each subject, and puts all into one table.

    Raises:
        NothingToSee: no subject has linear models.
        UserError: something is wrong with all of them.
    """
    number = int(options.extra.get("checkpoints", CHECKPOINTS))

    def look(subject: Subject) -> _Described:
        return _describe(subject, options.seed, number)

    looked = look_at_each(subjects, look, nothing="no spectrum")
    spectra: dict[str, Spectrum] = {}  # rows
    pictures: dict[str, Picture] = {}
    figures: dict[str, Any] = {}
    for index, (label, one) in enumerate(looked.found.items(), 1):
        spectra |= {f"{label}, {row}": found for row, found in one.course.rows().items()}
        spectra[label] = one.learned
        spectra |= {f"{label}, {name}": found for name, found in one.controls.items()}
        pictures |= _draw(label, one.learned, one.controls, index)
        figures[label] = _list_figures(one)
    courses = {label: one.course for label, one in looked.found.items()}
    left_out = [*looked.left_out, *(said for one in courses.values() for said in one.left_out)]
    return Exhibit(
        name="spectrum",
        title="Spectrum of the linear models",
        explanation=[*_HOW_TO_READ, *(f"Left out: {reason}." for reason in left_out)],
        pictures={**_draw_courses(courses), **pictures},
        figures={"subjects": figures, "left_out": left_out},
        table=tabulate(spectra),
    )


def _describe(subject: Subject, seed: int, number: int) -> _Described:
    models = read_linear_models(subject.weights, subject.label)
    learned = describe_models(models)
    controls = {
        "rotated": RotatedControl(seed).describe(models),
        "untrained": describe_models(draw_untrained(models, seed)),
    }
    return _Described(learned, controls, _follow(subject, learned, number))


def _list_figures(one: _Described) -> dict[str, Any]:
    summaries = {"learned": one.learned, **one.controls}
    return {
        **one.learned.to_dict(),
        "controls": {name: _shorten(found) for name, found in one.controls.items()},
        "summary": {name: summarize(found) for name, found in summaries.items()},
        "course": [{"steps": steps, **summarize(found)} for steps, found in one.course.points],
    }


def _shorten(control: Spectrum) -> dict[str, Any]:
    """Returns figures of a control, of its eigenvalues what is drawn."""
    content = control.to_dict()
    for scale, figures in control.scales.items():
        for name, matrix in figures.matrices.items():
            found = content["scales"][scale]["matrices"][name]
            del found["eigenvalues"]
            found["magnitudes"] = [float(f"{value:.5g}") for value in matrix.magnitudes.tolist()]
    return content


def _follow(subject: Subject, learned: Spectrum, number: int) -> Course:
    """Describes the earlier checkpoints of a run."""
    weights = subject.weights.resolve()
    info = info_of(str(weights))
    last = (info.iteration + 1, learned) if info is not None and info.iteration else None
    earlier: list[tuple[int, Spectrum]] = []
    epoch = math.nan
    left_out: list[str] = []
    if subject.folder is not None:
        found = list_checkpoints(subject.folder, number)
        found = [checkpoint for checkpoint in found if checkpoint.path.resolve() != weights]
        for checkpoint in tqdm(found, desc=f"spectra of {subject.label}", leave=False):
            try:
                models = read_linear_models(checkpoint.path, subject.label)
            except (NothingToSee, UserError) as reason:  # such as one that is being written
                left_out.append(f"step {checkpoint.steps:,} of '{subject.label}': {reason}")
            else:
                earlier.append((checkpoint.steps, describe_models(models)))
        try:
            solver = subject.cfg.SOLVER
            epoch = solver.MAX_ITER / solver.EPOCHS if solver.EPOCHS else math.nan
        except UserError as error:  # a config of another version: steps are known all the same
            left_out.append(f"epochs of '{subject.label}': {error}")
    for sentence in left_out:
        logger.warning("left out: %s", sentence)
    return Course(earlier, last, epoch, left_out)


def _draw(
    label: str, learned: Spectrum, controls: Mapping[str, Spectrum], index: int
) -> dict[str, Picture]:
    magnitudes = {
        scale: max(float(matrix.magnitudes[0]) for matrix in figures.matrices.values())
        for scale, figures in learned.scales.items()
    }
    largest = ", ".join(f"{value:.2f} at the {scale}" for scale, value in magnitudes.items())
    return {
        f"{index}_magnitudes": Picture.from_chart(
            lambda theme: plot_spectrum(
                learned, controls["rotated"], untrained=controls["untrained"], theme=theme
            ),
            alt=f"Magnitudes of the eigenvalues of {label}, the largest {largest}",
            caption=f"{label}: magnitudes of eigenvalues; grey is the rotated control, dotted the "
            "untrained one.",
        ),
        f"{index}_eigenvalues": Picture.from_chart(
            lambda theme: plot_eigenvalues(learned, theme=theme),
            alt=f"Eigenvalues of {label} in the complex plane, the largest magnitudes {largest}",
            caption=f"{label}: right of 0 a direction grows as it is carried, off the level line "
            "it turns.",
        ),
    }


def _draw_courses(courses: Mapping[str, Course]) -> dict[str, Picture]:
    courses = {label: course for label, course in courses.items() if len(course.points) > 1}
    if not courses:
        return {}
    in_epochs = all(math.isfinite(course.epoch) for course in courses.values())
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for label, course in courses.items():
        for steps, spectrum in course.points:
            for scale, figures in spectrum.scales.items():
                x, y = lines.setdefault(f"{label}, {scale}", ([], []))
                x.append(steps / course.epoch if in_epochs else steps)
                y.append(figures.energy_ratio)
    x_label = "epochs" if in_epochs else "steps"
    ends = "; ".join(f"{name} ends at {y[-1]:.4f}" for name, (_, y) in lines.items())
    return {
        "energy_ratios": Picture.from_chart(
            lambda theme: plot_energy_ratios(lines, x_label=x_label, theme=theme),
            alt=f"E(A)/E(B) against {x_label}: {ends}",
            caption="E(A)/E(B) at both scales over the course of training, the columns of Table 3.",
        )
    }

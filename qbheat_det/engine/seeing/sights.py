# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The table of all that can be seen: one line a sight, in the order of the report."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from qbheat_det.analysis.exhibit import Exhibit

from .classes import see_classes
from .curves import add_curve_flags, see_curves
from .detections import add_detection_flags, see_detections
from .options import Sight, SightOptions
from .probes import see_probes
from .refusal import NothingToSee
from .subject import Subject

See = Callable[[Sequence[Subject], SightOptions], Exhibit]


def _of_models(see: See) -> See:
    """Returns a sight in which files of nothing but figures of probes have no part."""

    @functools.wraps(see)
    def see_models(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
        models = [subject for subject in subjects if not subject.has_figures_alone]
        if not models:
            names = ", ".join(f"'{subject.label}'" for subject in subjects)
            raise NothingToSee(f"{names}: figures of probes alone, and no model")
        return see(models, options)

    return see_models


SIGHTS: dict[str, Sight] = {
    sight.name: sight if sight.see is see_probes else replace(sight, see=_of_models(sight.see))
    for sight in (
        Sight("curves", "losses, scores and learning rate of runs on one axis", see_curves,
              add_curve_flags),
        Sight("detections", "AP by size and class, curves, errors, worst misses and false alarms",
              see_detections, add_detection_flags),
        Sight("classes", "which classes a classifier takes for which", see_classes),
        Sight("probes", "accuracies of probes by decoder, by its width and by images seen",
              see_probes),
    )
}  # fmt: skip
"""By name, in the order in which a report shows them."""

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The table of all that can be seen: one line a sight, in the order of the report."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from qbheat_det.analysis.exhibit import Exhibit

from .attention import add_attention_flags, see_attention
from .beyond import add_beyond_flags, see_beyond
from .correlation import add_correlation_flags, see_correlation
from .heat import add_heat_flags, see_heat
from .options import Sight, SightOptions
from .queries import add_query_flags, see_queries
from .reconstructions import see_reconstructions
from .refusal import NothingToSee
from .spectrum import add_spectrum_flags, see_spectrum
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
    sight.name: replace(sight, see=_of_models(sight.see))
    for sight in (
        Sight("reconstructions", "what is made of an image from a corner and from the centre",
              see_reconstructions),
        Sight("correlation", "histograms over images of how alike the positions of a map are",
              see_correlation, add_correlation_flags),
        Sight("heat", "class activation of a classifier beside steady heat in the same border",
              see_heat, add_heat_flags),
        Sight("attention", "where tokens look, and which of them pixels listen to",
              see_attention, add_attention_flags),
        Sight("queries", "where the object queries of MF-DETR look for their boxes",
              see_queries, add_query_flags),
        Sight("spectrum", "eigenvalues of A and B at both scales, and Table 3 over a run",
              see_spectrum, add_spectrum_flags),
        Sight("beyond", "what lies outside the picture: features carried on and decoded",
              see_beyond, add_beyond_flags),
    )
}  # fmt: skip
"""By name, in the order in which a report shows them."""

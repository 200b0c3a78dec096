# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The table of all that can be seen: one line a sight, in the order of the report."""

from .attention import add_attention_flags, see_attention
from .beyond import add_beyond_flags, see_beyond
from .classes import see_classes
from .correlation import add_correlation_flags, see_correlation
from .curves import add_curve_flags, see_curves
from .detections import add_detection_flags, see_detections
from .heat import add_heat_flags, see_heat
from .options import Sight
from .queries import add_query_flags, see_queries
from .reconstructions import see_reconstructions
from .spectrum import add_spectrum_flags, see_spectrum

SIGHTS: dict[str, Sight] = {
    sight.name: sight
    for sight in (
        Sight("curves", "losses, scores and learning rate of runs on one axis", see_curves,
              add_curve_flags),
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
        Sight("detections", "AP by size and class, curves, errors, worst misses and false alarms",
              see_detections, add_detection_flags),
        Sight("classes", "which classes a classifier takes for which", see_classes),
        Sight("spectrum", "eigenvalues of A and B at both scales, and Table 3 over a run",
              see_spectrum, add_spectrum_flags),
        Sight("beyond", "what lies outside the picture: features carried on and decoded",
              see_beyond, add_beyond_flags),
    )
}  # fmt: skip
"""By name, in the order in which a report shows them."""

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The table of all that can be seen: one line a sight, in the order of the report."""

from .curves import add_curve_flags, see_curves
from .options import Sight

SIGHTS: dict[str, Sight] = {
    sight.name: sight
    for sight in (
        Sight("curves", "losses, scores and learning rate of runs on one axis", see_curves,
              add_curve_flags),
    )
}  # fmt: skip
"""By name, in the order in which a report shows them."""

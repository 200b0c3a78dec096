# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a run logged: quantities in ``metrics.json`` by iteration."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Curve = tuple[list[float], list[float]]
"""Positions on an axis, rising, and values; nan is a gap."""
_QUANTITIES = {  # pattern of keys: title of the chart, label of the values
    r"^total_loss$": ("Total loss", "loss"),
    r"loss(?!.*_\d+$)": ("Loss: {}", "loss"),  # inner decoder blocks (_0) repeat the last
    r"/AP(50|75)?$": ("{} on the test set", "AP (%)"),
    r"accuracy$|/top[15]$": ("Accuracy: {}", "accuracy (%)"),
    r"^correlation/mean$": ("Spatial correlation of the map", "mean |correlation|"),
    r"^lr$": ("Learning rate", "learning rate"),
    r"^gradient_norm$": ("Norm of the gradients", "norm"),
}


@dataclass(frozen=True)
class Quantity:
    """A logged key with the title of its chart and the label of its values."""

    key: str
    title: str
    label: str

    @property
    def is_score(self) -> bool:
        return self.label.endswith("(%)")


def has_step(record: Mapping[str, Any]) -> bool:
    """Whether a record of ``metrics.json`` has its iteration."""
    iteration = record.get("iteration")
    return isinstance(iteration, int | float) and math.isfinite(iteration)


def read_series(records: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """Returns the iterations at which a key was logged, rising, and its values.

    Where a resumed run repeats an iteration, the later record counts. What is not finite is nan;
    both lists are empty if nothing is finite.
    """
    points = {
        float(record["iteration"]): float(record[key])
        for record in records
        if isinstance(record.get(key), int | float) and has_step(record)
    }
    if not any(map(math.isfinite, points.values())):
        return [], []
    iterations = sorted(points)
    values = [points[iteration] for iteration in iterations]
    return iterations, [value if math.isfinite(value) else math.nan for value in values]


def find_quantities(records: Sequence[Mapping[str, Any]]) -> list[Quantity]:
    """Returns what a log holds, in the order of ``_QUANTITIES``; AP of single classes is not."""
    keys = dict.fromkeys(key for record in records for key in record)
    found: dict[str, Quantity] = {}
    for pattern, (title, label) in _QUANTITIES.items():
        for key in keys:
            if key not in found and re.search(pattern, key) and read_series(records, key)[0]:
                found[key] = Quantity(key, title.format(key), label)
    return list(found.values())


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the leaves of a nested mapping, such as a config, by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= {f"{key}.{name}": leaf for name, leaf in flatten(value).items()}
        else:
            leaves[key] = value
    return leaves

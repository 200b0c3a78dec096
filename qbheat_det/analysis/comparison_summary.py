# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mean and spread over seeds of what objectives of pre-training reach, from single results."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

RANDOM = "random"
_ACCURACIES = ("probes", "probes_as_stored")


@dataclass(frozen=True)
class Spread:
    """One figure over seeds.

    Attributes:
        mean: over the seeds.
        deviation: standard deviation of one seed (n - 1); nan of a single one.
        values: by seed.
        standard_error: of an accuracy in percent over the images that were classified, binomial
            at the mean; nan of other figures.
    """

    mean: float
    deviation: float
    values: Mapping[int, float]
    standard_error: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it, None for nan, which JSON lacks."""
        return {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in asdict(self).items()
        }


def summarise(values: Mapping[int, float], *, num_images: int = 0) -> Spread:
    """Returns mean and spread of a figure.

    Args:
        values: one for each seed, at least one.
        num_images: that an accuracy in percent is a share of; 0 for other figures.
    """
    numbers = list(values.values())
    mean = statistics.fmean(numbers)
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    share = min(max(mean / 100, 0.0), 1.0)
    error = 100 * math.sqrt(share * (1 - share) / num_images) if num_images else math.nan
    return Spread(mean, deviation, dict(values), error)


def list_measures(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns what was judged by, as "stage/figure" with its title, in the order of the table.

    Args:
        results: of single stages.
    """
    found: dict[str, str] = {}
    stages = {result["stage"] for result in results}
    for stage in _ACCURACIES:
        names = [
            name
            for result in results
            if result["stage"] == stage
            for name in result["figures"]
            if name != "setting"
        ]
        found |= {f"{stage}/{name}": _title(name) for name in dict.fromkeys(names)}
    known = {"pretraining", "backbone", *_ACCURACIES}
    for stage in [name for name in ("retinanet", "mf-dec-211") if name in stages]:
        found |= {f"{stage}/{name}": f"{_title(stage)} {name}" for name in ("AP", "AP50")}
    for stage in sorted(stages - known - {"retinanet", "mf-dec-211"}):
        found |= {f"{stage}/AP": f"{stage} AP"}
    return found


def collect(results: Sequence[Mapping[str, Any]], objective: str, measure: str) -> Spread | None:
    """Returns a measure of an objective over the seeds that have it; None where none has.

    Args:
        results: of single stages.
        objective: name of the row.
        measure: "stage/figure".
    """
    stage, _, name = measure.partition("/")
    values: dict[int, float] = {}
    num_images = 0
    for result in results:
        if (result["objective"], result["stage"]) != (objective, stage):
            continue
        figure = result["figures"].get(name)
        if isinstance(figure, Mapping):
            num_images = int(figure.get("num_images", 0))
            figure = figure.get("top1")
        if isinstance(figure, int | float) and math.isfinite(figure):
            values[int(result["seed"])] = float(figure)
    return summarise(values, num_images=num_images) if values else None


def summarise_all(
    results: Sequence[Mapping[str, Any]], objectives: Sequence[str]
) -> dict[str, dict[str, Spread]]:
    """Returns every measure, and what training cost, by objective.

    Args:
        results: of single stages.
        objectives: rows, in order.
    """
    names = [
        *list_measures(results),
        *(f"pretraining/{n}" for n in ("images_seen", "seconds", "seconds_per_image")),
        *(f"backbone/{n}" for n in ("madds_of_training", "madds_of_a_whole_image")),
    ]
    return {
        objective: {
            name: spread
            for name in names
            if (spread := collect(results, objective, name)) is not None
        }
        for objective in objectives
    }


def _title(name: str) -> str:
    titles = {"knn": "kNN", "retinanet": "RetinaNet", "mf-dec-211": "MF-Dec-211"}
    return titles.get(name, name)

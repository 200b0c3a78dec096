# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The probes by their names, from the features of two sets of images to a score."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.evaluation import TopAccuracy, rank_true_class, score_neighbours

from .features import FrozenFeatures
from .linear import L2_GRID, fit_linear_probe
from .transformer import TransformerSettings, fit_transformer_probe

PROBES = ("knn", "linear", "tran-1", "tran-4")
"""The probes of the paper and kNN; "tran-k" may have any k, and a width: "tran-k:width"."""

_TRANSFORMER = re.compile(r"tran-([1-9]\d?)(?::([1-9]\d{0,4}))?")
_HEAD = 64  # width of an attention head, of which a width is a multiple


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of all probes."""

    num_classes: int
    k: int = 20  # nearest neighbours that vote
    temperature: float = 0.07  # of their votes
    l2_grid: tuple[float, ...] = L2_GRID  # of the linear probe
    transformer: TransformerSettings = field(default_factory=TransformerSettings)
    seed: int = 0
    device: str = "cpu"  # that trains tran-k

    def to_dict(self) -> dict[str, Any]:
        """Returns all but the device, which scores do not depend on."""
        transformer = dataclasses.asdict(self.transformer)
        del transformer["depth"]
        return {
            "num_classes": self.num_classes,
            "seed": self.seed,
            "knn": {"k": self.k, "temperature": self.temperature},
            "linear": {"l2_grid": list(self.l2_grid), "share": self.transformer.share},
            "tran": transformer,
        }


def run_probe(
    name: str, train: FrozenFeatures, val: FrozenFeatures, *, settings: ProbeSettings
) -> tuple[TopAccuracy, dict[str, Any]]:
    """Learns from the images of one set and classifies those of another, once.

    Args:
        name: as in ``PROBES``.
        train: features of the images to learn from, and to choose settings on.
        val: features of those that are classified; nothing is chosen on them.
        settings: all else.

    Returns:
        The score, and what was chosen, see ``fit_linear_probe`` and ``fit_transformer_probe``.
    """
    if name == "knn":
        voters, asked = (train.pooled, train.labels), (val.pooled, val.labels)
        score = score_neighbours(voters, asked, k=settings.k, temperature=settings.temperature)
        return score, {}
    if name == "linear":
        linear, chosen = fit_linear_probe(
            train.joined,
            train.labels,
            num_classes=settings.num_classes,
            grid=settings.l2_grid,
            share=settings.transformer.share,
            seed=settings.seed,
        )
        logits = linear(val.joined)
    else:
        transformer, chosen = fit_transformer_probe(
            train,
            num_classes=settings.num_classes,
            settings=dataclasses.replace(
                settings.transformer,
                depth=depth_of(name),
                width=width_of(name) or settings.transformer.width,
            ),
            seed=settings.seed,
            device=settings.device,
        )
        logits = transformer(val)
    return TopAccuracy.from_ranks(rank_true_class(logits, val.labels)), chosen


def check_probes(names: Sequence[str]) -> None:
    """Checks names of probes.

    Raises:
        UserError: there are none, one is not known, or has a width that cannot be.
    """
    unknown = [name for name in names if name not in ("knn", "linear") and not depth_of(name)]
    if unknown or not names:
        given = ", ".join(map(repr, unknown)) or "none"
        raise UserError(f"probes are {', '.join(PROBES)}, not {given}")
    uneven = [name for name in names if width_of(name) % _HEAD]
    if uneven:
        raise UserError(f"widths of tran-k are multiples of {_HEAD}, unlike that of '{uneven[0]}'")


def spread_widths(names: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Returns the probes with each tran-k once at every width, for the paper's Fig. 8.

    Args:
        names: as in ``PROBES``; those that have a width keep it.
        widths: none leaves the names as they are.

    Raises:
        UserError: there are widths and no tran-k, or a width is not positive.
    """
    if any(width < 1 for width in widths):
        raise UserError(f"widths are positive multiples of {_HEAD}, not {min(widths)}")
    if widths and not any(map(depth_of, names)):
        raise UserError("widths are of tran-k, and no such probe is named")
    spread = []
    for name in names:
        bare = depth_of(name) and not width_of(name)
        spread += [f"{name}:{width}" for width in widths] if bare and widths else [name]
    return list(dict.fromkeys(spread))


def depth_of(name: str) -> int:
    """Returns k of "tran-k"; 0 for any other probe."""
    found = _TRANSFORMER.fullmatch(name)
    return int(found[1]) if found else 0


def width_of(name: str) -> int:
    """Returns the width of "tran-k:width"; 0 where the name has none."""
    found = _TRANSFORMER.fullmatch(name)
    return int(found[2] or 0) if found else 0

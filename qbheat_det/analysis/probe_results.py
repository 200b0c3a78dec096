# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Results of probes, read from the files of tools/probe_backbone.py and of comparisons."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from qbheat_det.core.errors import UserError
from qbheat_det.probing import depth_of, width_of

RANDOM = "random"


class Decoder(NamedTuple):
    """Nearest neighbors (power 0), a linear classifier (1) or tran-k (2) of depth k and a width."""

    power: int
    depth: int = 0
    width: int = 0

    @property
    def name(self) -> str:
        return ("kNN", "linear", f"tran-{self.depth}")[self.power]

    @property
    def title(self) -> str:
        return f"{self.name}, width {self.width}" if self.width else self.name


@dataclass(frozen=True)
class ProbeResult:
    """One probe of one backbone.

    Attributes:
        series: one run with its checkpoints, one objective with its seeds, or all random backbones.
        backbone: file of the weights, or "random, seed 1".
        images_seen: in training; 0 for a random backbone, None where unknown.
        recalibrated: whether BatchNorm's statistics are of whole images.
        decoder: of the probe.
        top1: in percent.
        error: standard error of ``top1`` over the images.
    """

    series: str
    backbone: str
    images_seen: int | None
    recalibrated: bool
    decoder: Decoder
    top1: float
    error: float


def read_probes(file: Path) -> tuple[dict[str, Any], list[ProbeResult]]:
    """Reads settings and results that ``tools/probe_backbone.py --json`` or a comparison wrote.

    Raises:
        UserError: the file cannot be read, or has no results.
    """
    try:
        setting, results = parse_results(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"'{file}' has no results of probes: {error!r}") from error
    if not results:
        raise UserError(f"'{file}' has no results of probes")
    return setting, results


def choose_statistics(results: Sequence[ProbeResult]) -> list[ProbeResult]:
    """Returns the recalibrated results of each series, or all if there are none.

    Random backbones keep both, the others as a series of their own: either may be higher.
    """
    recalibrated = {result.series for result in results if result.recalibrated}
    chosen = []
    for result in results:
        if result.recalibrated or result.series not in recalibrated:
            chosen.append(result)
        elif result.images_seen == 0:
            chosen.append(replace(result, series=f"{result.series}, as initialized"))
    return chosen


def parse_results(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[ProbeResult]]:
    """Returns setting and results of a file's content; those that are not numbers are left out."""
    setting = dict(content["setting"])
    return setting, list(_read_rows(list(content["rows"]), setting))


def _read_rows(
    rows: Sequence[Mapping[str, Any]], setting: Mapping[str, Any]
) -> Iterator[ProbeResult]:
    seen_in: dict[Path, list[tuple[Any, Any]]] = {}
    for row in rows:
        key = (row["images_seen"], row["digest"])
        own = seen_in.setdefault(Path(row["backbone"]).parent, [])
        own += [] if key in own or row["images_seen"] == 0 else [key]
    for row in rows:
        seen, path = row["images_seen"], Path(row["backbone"])
        numbers = [number for number, _ in seen_in[path.parent]]
        # Files of one folder that saw different numbers of images are checkpoints of one run.
        is_run = len(set(numbers)) == len(numbers) and (None not in numbers or len(numbers) == 1)
        series = str(path.parent) if is_run else str(path.parent / path.stem)
        if seen == 0:
            series = RANDOM
        if row["top1"] is not None:
            yield ProbeResult(
                series=row.get("series", series),
                backbone=str(row["backbone"]),
                images_seen=None if seen is None else int(seen),
                recalibrated=bool(row["recalibrated"]),
                decoder=_read_decoder(row["probe"], setting),
                top1=float(row["top1"]),
                error=float(row["top1_standard_error"] or 0.0),
            )


def _read_decoder(probe: str, setting: Mapping[str, Any]) -> Decoder:
    if depth := depth_of(probe):
        return Decoder(2, depth, width_of(probe) or int(setting["tran"]["width"]))
    return Decoder(int(probe == "linear"))

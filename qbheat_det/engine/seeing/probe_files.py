# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures of probes in files, as ``probe_backbone`` and a comparison of objectives write them."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbheat_det.analysis.comparison_summary import RANDOM
from qbheat_det.analysis.probe_results import Decoder, ProbeResult
from qbheat_det.core.errors import UserError
from qbheat_det.probing import depth_of, width_of

FILES = ("probes.json", "comparison.json")
"""What they are called in the folder of a run, and of a comparison."""
_STAGES = {"probes": True, "probes_as_stored": False}
_NO_FIGURES = (
    "'{}' holds no figures of probes, which tools/probe_backbone.py --json and "
    "tools/compare_pretraining.py write: name another file"
)


@dataclass(frozen=True)
class ProbeFile:
    """What one file holds.

    Attributes:
        results: each accuracy; series are named within the file, "" for its one run.
        setting: under which all of them came about.
    """

    results: Sequence[ProbeResult]
    setting: Mapping[str, Any]

    @property
    def task(self) -> str:
        """Tells the images that were learned from and classified, for what can be compared."""
        keys = ("contents", "num_images", "num_classes")
        return json.dumps([self.setting.get(key) for key in keys])


def read_probes(file: Path) -> ProbeFile:
    """Reads figures of probes: of backbones, of one stage of a comparison, or of a comparison.

    Accuracies that are none are left out.

    Raises:
        UserError: the file cannot be read, or holds none.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = _read_rows(content) if "rows" in content else _read_stages(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(_NO_FIGURES.format(file)) from error
    if not found.results:
        raise UserError(_NO_FIGURES.format(file))
    return found


def _read_rows(content: Mapping[str, Any]) -> ProbeFile:
    setting, rows = dict(content["setting"]), list(content["rows"])
    names = _name_series(rows)
    results = [
        result
        for row in rows
        for result in _read_row(row, names[row["backbone"]], bool(row["recalibrated"]), setting)
    ]
    return ProbeFile(results, setting)


def _read_stages(content: Mapping[str, Any]) -> ProbeFile:
    """Series are objectives, and their backbones differ in the seed."""
    stages = [stage for stage in content.get("results", [content]) if stage["stage"] in _STAGES]
    results: list[ProbeResult] = []
    setting: dict[str, Any] = {}
    for stage in stages:
        figures = dict(stage["figures"])
        setting = dict(figures.pop("setting"))
        for row in figures.values():
            results += _read_row(row, stage["objective"], _STAGES[stage["stage"]], setting)
    return ProbeFile(results, setting)


def _read_row(
    row: Mapping[str, Any], series: str, recalibrated: bool, setting: Mapping[str, Any]
) -> Iterator[ProbeResult]:
    if row["top1"] is None:  # not a number
        return
    seen = row["images_seen"]
    result = ProbeResult(
        series=series,
        backbone=str(row["backbone"]),
        images_seen=None if seen is None else int(seen),
        recalibrated=recalibrated,
        decoder=_read_decoder(str(row["probe"]), setting),
        top1=float(row["top1"]),
        error=float(row["top1_standard_error"] or 0.0),
    )
    if math.isfinite(result.top1) and math.isfinite(result.error):
        yield result


def _read_decoder(probe: str, setting: Mapping[str, Any]) -> Decoder:
    depth = depth_of(probe)
    if depth:
        width = width_of(probe) or int(setting["tran"]["width"])
        return Decoder(2, depth, width, f"tran-{depth}")
    return Decoder(1, 0, 0, "linear") if probe == "linear" else Decoder(0, 0, 0, "kNN")


def _name_series(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the series of each backbone of a file.

    Files of weights in one folder that have seen different numbers of images are the checkpoints
    of one run. Else each is a series of its own, as where exports of several runs lie together.
    """
    digests: dict[Path, dict[int | None, set[str]]] = {}
    for row in rows:
        if row["images_seen"] != 0:
            of_folder = digests.setdefault(Path(row["backbone"]).parent, {})
            of_folder.setdefault(row["images_seen"], set()).add(row["digest"])
    runs = {
        folder
        for folder, seen in digests.items()
        if all(len(same) == 1 for same in seen.values()) and (None not in seen or len(seen) == 1)
    }
    labels = _shorten(list(digests))
    names = {}
    for row in rows:
        path = Path(row["backbone"])
        if row["images_seen"] == 0:
            names[row["backbone"]] = RANDOM
        elif path.parent not in runs:
            names[row["backbone"]] = f"{path.parent.name}/{path.stem}"
        else:
            names[row["backbone"]] = "" if len(digests) == 1 else labels[path.parent]
    return names


def _shorten(folders: Sequence[Path]) -> dict[Path, str]:
    """Returns the ends of paths, as long as they must be to differ."""
    number = 1
    while True:
        names = {folder: "/".join(folder.parts[-number:]) for folder in folders}
        if len(set(names.values())) == len(folders):  # in the end they do, being different paths
            return names
        number += 1

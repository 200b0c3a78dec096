# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images a second that each kind of loader gives alone, beside those that its steps would take.

Each kind is rehearsed as ``tools/train_net.py --dry-run`` does it, on JPEG files drawn for it, in
one process without workers: a ratio of r says that steps wait 1 / (1 + r) of their time where
loading and computing take turns, and not at all with a worker, where it is above 1 and there is a
core for it.
"""

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cached_cases import CASES, Case, make_config
from benchmarks.timing import Result, set_threads

_FROM_FILES = {"INPUT.PRETRAIN.MEMORY_GB": 0.0}
_DETECTION = {"size": (192, 320), "batch": 4, "file_size": (480, 640)}
_IMAGES = {"size": (128, 128), "batch": 64, "file_size": (240, 320)}
_CACHED: dict[str, Any] = {"MODEL.CACHE_FEATURES.ENABLED": True}
KINDS: Mapping[str, tuple[Case, int]] = {
    "boxes": (Case("boxes, RetinaNet", "custom/retinanet_285M_scratch.yaml", **_DETECTION), 0),
    "boxes_detr": (Case("boxes, MF-DETR", "custom/mf_detr_211_285M_scratch.yaml", **_DETECTION), 0),
    "image_folder": (
        Case("image folder, QB-Heat", "custom/qb_heat_285M_cpu.yaml", **_IMAGES, opts=_FROM_FILES),
        0,
    ),
    "image_folder_in_memory": (
        Case("the same in memory", "custom/qb_heat_285M_cpu.yaml", **_IMAGES),
        0,
    ),
    "class_folders": (
        Case("class folders, tran-1", "custom/tran1_285M_finetune.yaml", **_IMAGES),
        0,
    ),
    "cached_features": (dataclasses.replace(CASES["285m_linear"], opts=_CACHED), 1),
}
"""By name: what is trained, and how many fixed views each image has."""


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Rehearses each kind.

    Args:
        quick: two kinds with few images, to see that everything runs.
        threads: CPU threads of the steps; loading takes one.

    Returns:
        A row each; "ours" is the loader alone and "peer" what steps would take, images a second.
    """
    from qbheat_det.engine import Trainer
    from qbheat_det.engine.dry_run import dry_run

    set_threads(threads)
    rows = []
    for name in ("boxes_detr", "cached_features") if quick else KINDS:
        case, views = KINDS[name]
        if quick:
            case = dataclasses.replace(case, batch=2, file_size=(64, 96))
        with tempfile.TemporaryDirectory() as folder:
            cfg = make_config(case, Path(folder), num_images=8 if quick else 128)
            cfg.INPUT.FIXED_VIEWS.COUNT = views
            cfg.MODEL.CACHE_FEATURES.FOLDER = str(Path(folder) / "cache")
            cfg.VIS.ENABLED = False
            report = dry_run(cfg, Trainer, num_steps=2 if quick else 6)
        loader, steps = report.loader_images_per_second, report.wanted_images_per_second
        print(f"  {case.title:<28} loader {loader:7.1f}, steps {steps:7.1f} images a second")
        rows.append(Result(f"data_path/{name}_vs_step", loader, steps, "im/s", loader / steps))
    return rows

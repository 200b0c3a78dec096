# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Seconds per training step of five recipes, in float32 and (if supported) in bfloat16.

Each job runs whole steps of the package's trainer: forward, backward, optimizer and hooks. The time
in which a step waits for images does not count. Images are synthetic, and weights are random. To
compare two versions of the package, run this file in both checkouts in turns.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cached_cases import Case, make_config, shrunk
from benchmarks.timing import Result, Sample, set_threads
from benchmarks.trainer_steps import Steps
from qbheat_det.core.environment import supports_bfloat16

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_BF16 = {"SOLVER.AMP.ENABLED": True, "SOLVER.AMP.PRECISION": "bfloat16"}
_BOXES: dict[str, Any] = {
    "size": (480, 640),
    "batch": 2,
    "file_size": (480, 640),
    "opts": {
        "INPUT.MIN_SIZE_TRAIN": (480,),
        "INPUT.MAX_SIZE_TRAIN": 640,
        "INPUT.DETR_CROP_RESIZE": [],
    },
}
_SQUARES: dict[str, Any] = {"size": (128, 128), "file_size": (256, 320)}
JOBS = {
    "default_recipe": Case(
        "RetinaNet on Lite0, the default recipe at 288 px",
        "custom/retinanet_lite0_finetune.yaml",
        size=(288, 448),
        batch=4,
        file_size=(480, 640),
        opts={
            "INPUT.MIN_SIZE_TRAIN": (224, 256, 288),
            "INPUT.MAX_SIZE_TRAIN": 448,
            "INPUT.DETR_CROP_RESIZE": [256, 320],
            "INPUT.DETR_CROP_RANGE": [192, 288],
        },
    ),
    "retinanet_285m": Case("MF-285M + RetinaNet", "coco/retinanet_285M_finetune.yaml", **_BOXES),
    "mf_detr_285m_211": Case(
        "MF-285M + MF-Dec-211", "coco/mf_detr_211_285M_finetune.yaml", **_BOXES
    ),
    "qb_heat_285m_128px": Case(
        "QB-Heat 285M at 128 px", "custom/qb_heat_285M_cpu.yaml", batch=16, **_SQUARES
    ),
    "distill_285m_128px": Case(
        "distillation of a teacher's cached features",
        "custom/distill_285M_cpu.yaml",
        batch=16,
        **_SQUARES,
    ),
}


def run(
    *,
    quick: bool,
    threads: int = 1,
    cases: Sequence[str] = (),
    rounds: int = 7,
    clock: str = "wall",
) -> list[Result]:
    """Runs steps in turns in float32 and, if the processor supports it, in bfloat16.

    Returns:
        A row per job with the seconds per step of the faster precision, against float32.
    """
    set_threads(threads)
    if quick:
        rounds = 1
    rows = []
    for name in cases or JOBS:
        case = JOBS[name]
        if quick:
            case = shrunk(case)
        with tempfile.TemporaryDirectory() as folder:
            seconds = time_steps(case, Path(folder), rounds=rounds, clock=clock)
        print(f"  {case.title}: {', '.join(f'{key} {each} s' for key, each in seconds.items())}")
        best = min(each.median for each in seconds.values())
        row = f"training/{name}_step_s"
        rows.append(Result.lower_is_better(row, best, seconds["float32"].median, "s"))
    return rows


def time_steps(case: Case, folder: Path, *, rounds: int, clock: str) -> dict[str, Sample]:
    """Returns the seconds per step by precision."""
    now = CLOCKS[clock]
    precisions: dict[str, dict[str, Any]] = {"float32": {}}
    if supports_bfloat16(torch.device("cpu")):
        precisions["bfloat16"] = _BF16
    trainers = {}
    for name, opts in precisions.items():
        cfg = make_config(case, folder / name, num_images=2 * case.batch)
        cfg.MODEL.TEACHER.WEIGHTS = ""
        cfg.SOLVER.AMP.ENABLED = False
        cfg.merge_from_list([word for pair in opts.items() for word in pair])
        trainers[name] = Steps(cfg, now)
    taken: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(-2, rounds):  # the first two rounds are a warm-up
        for name, step in trainers.items():
            start = now()
            waited, _ = step()
            if number >= 0:
                taken[name].append(now() - start - waited)
    return {name: Sample.of(seconds) for name, seconds in taken.items()}

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trains a model, records the run and writes its report."""

import logging
import shlex
import time
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm

from qbheat_det.analysis.report import build_report
from qbheat_det.analysis.run import FigureOptions, Run
from qbheat_det.core.text import format_duration, join_first
from qbheat_det.engine import Trainer, record_start
from qbheat_det.engine.resume import find_duration, find_shared_images

logger = logging.getLogger(__name__)
_FIGURES = {"detector": ("detections",), "classifier": ("classes",)}
_NUM_PICTURES = 12  # images in a report


def train(cfg: CfgNode, *, resume: bool = False, allow_partial: bool = False) -> dict[str, Any]:
    """Trains a model, records the run, and writes its report.

    Args:
        cfg: config returned by ``build_config``.
        resume: continue the run in ``OUTPUT_DIR`` if it has a checkpoint.
        allow_partial: allow ``MODEL.WEIGHTS`` to lack tensors of the model, or to have extra ones.

    Returns:
        The results of the last evaluation.
    """
    trainer = Trainer(cfg, allow_partial=allow_partial)
    trainer.resume_or_load(resume=resume)
    if not comm.is_main_process():
        return trainer.train()
    add_duration = record_start(trainer.cfg, resumed_from=trainer.resumed_from, seed=trainer.seed)
    start = time.monotonic()
    try:
        results = trainer.train()
    finally:
        add_duration(time.monotonic() - start)
    logger.info(f"Report: '{write_run_report(trainer.cfg)}'")
    return results


def write_run_report(cfg: CfgNode) -> Path:
    """Writes ``report.html`` into the folder of a finished run, and returns its path."""
    folder, model = Path(cfg.OUTPUT_DIR), cfg.MODEL
    seconds = find_duration(folder)
    shared = "".join(f" Note: {text}." for text in find_shared_images(folder))
    page = folder / "report.html"
    run = Run.open(folder, label=folder.resolve().name, device=model.DEVICE)
    names = [*_FIGURES.get(run.kind, ()), "curves"]
    duration = "" if seconds is None else f" in {format_duration(seconds)}"
    weights = f", starting from '{model.WEIGHTS}'" if model.WEIGHTS else ""
    best = ""
    if (folder / "model_best.safetensors").exists():
        best = (
            " This page shows the last weights, model_final.safetensors. Commands that name the "
            "folder take model_best.safetensors, the weights with the best evaluation."
        )
    build_report(
        names,
        [run],
        FigureOptions(num_images=_NUM_PICTURES),
        {},
        output=page,
        command=shlex.join(
            ["qbheat", "report", str(folder), "--output", str(page), "--only", *names]
        ),
        title=f"{model.META_ARCHITECTURE}: {join_first(model.CLASS_NAMES)}".removesuffix(": "),
        lead=f"Trained for {cfg.SOLVER.MAX_ITER:,} steps of {cfg.SOLVER.IMS_PER_BATCH} images"
        f"{duration}{weights}.{shared}{best}",
    )
    return page

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trains a model, records the run and writes its report."""

import logging
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm

from qbheat_det.analysis import load_figures
from qbheat_det.analysis.report import build_report
from qbheat_det.analysis.run import FigureOptions, Run
from qbheat_det.core.text import format_duration, join_first
from qbheat_det.engine import Trainer, write_run_record

logger = logging.getLogger(__name__)
_FIGURES = {"detector": ("detections",), "classifier": ("classes",)}
_NUM_PICTURES = 12  # images in a report


def train(cfg: CfgNode, *, resume: bool = False, allow_partial: bool = False) -> dict[str, Any]:
    """Trains a model, records the run, and writes its report.

    Args:
        cfg: config returned by ``build_config``.
        resume: continue the run in ``OUTPUT_DIR``.
        allow_partial: allow ``MODEL.WEIGHTS`` to lack tensors of the model, or to have others.

    Returns:
        The results of the last evaluation.
    """
    load_figures()
    trainer = Trainer(cfg, allow_partial=allow_partial)
    trainer.resume_or_load(resume=resume)
    if comm.is_main_process():
        write_run_record(
            trainer.cfg,
            command=sys.argv,
            resumed_from=trainer.resumed_from,
            processes=comm.get_world_size(),
            seed=trainer.seed,
        )
    start = time.monotonic()
    results = trainer.train()
    if comm.is_main_process():
        seconds = None if trainer.start_iter else time.monotonic() - start
        logger.info(f"Report: '{write_run_report(trainer.cfg, seconds)}'")
    return results


def write_run_report(cfg: CfgNode, seconds: float | None = None) -> Path:
    """Writes ``report.html`` into the folder of a finished run, and returns its path.

    ``seconds`` is the duration of the training, if known.
    """
    folder, model = Path(cfg.OUTPUT_DIR), cfg.MODEL
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
        f"{duration}{weights}.{best}",
    )
    return page

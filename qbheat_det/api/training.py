# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training as ``tools/train_net.py`` does it, from Python."""

import logging
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm

from qbheat_det.analysis import load_figures
from qbheat_det.analysis.report import build_report
from qbheat_det.analysis.run import FigureOptions, Run
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_duration, join_first
from qbheat_det.engine import Trainer, build_config, evaluate, setup, write_run_record
from qbheat_det.engine.console import removes_empty_run
from qbheat_det.engine.run_flags import RunFlags

logger = logging.getLogger(__name__)
_FIGURES = {"detector": ("detections",), "classifier": ("classes",)}
_NUM_PICTURES = 12  # in a report


def train(cfg: CfgNode, *, resume: bool = False, allow_partial: bool = False) -> dict[str, Any]:
    """Trains in each process, records the run, and writes its report; see ``build_config``.

    With ``allow_partial``, part of ``MODEL.WEIGHTS`` may fit nowhere; ``resume`` continues the run
    in ``OUTPUT_DIR``. Returns the results of the last evaluation.
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
    results: dict[str, Any] = trainer.train()
    if comm.is_main_process():
        seconds = None if trainer.start_iter else time.monotonic() - start
        logger.info(f"Report: '{write_run_report(trainer.cfg, seconds)}'")
    return results


def write_run_report(cfg: CfgNode, seconds: float | None = None) -> Path:
    """Writes ``report.html`` of a finished run into its folder, and returns the page.

    ``seconds`` is the duration of the training, if it is known.
    """
    folder, model = Path(cfg.OUTPUT_DIR), cfg.MODEL
    page = folder / "report.html"
    run = Run.open(folder, label=folder.resolve().name, device=model.DEVICE)
    names = [*_FIGURES.get(run.kind, ()), "curves"]
    duration = "" if seconds is None else f" in {format_duration(seconds)}"
    weights = f", starting from '{model.WEIGHTS}'" if model.WEIGHTS else ""
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
        f"{duration}{weights}.",
    )
    return page


def train_detector(
    cfg: CfgNode,
    data: str,
    *,
    epochs: float,
    output: str | Path | None,
    overrides: Mapping[str, Any],
    **flags: Any,
) -> Run:
    """Trains from the weights of a config on other data, see ``Detector.train``."""
    folder = Path(output) if output is not None else _find_free(Path(get_cfg().OUTPUT_DIR))
    if output is not None and (folder / "config.yaml").exists():
        raise UserError(f"'{folder}' holds a run: name another folder, or resume by qbheat train")
    values = {
        "SOLVER.EPOCHS": epochs,
        "MODEL.DEVICE": cfg.MODEL.DEVICE,
        "MODEL.DEPLOY.ENABLED": False,
        **overrides,
    }
    opts = [text for key, value in values.items() for text in (key, str(value))]
    try:
        asked = RunFlags(
            data=data, weights=cfg.MODEL.WEIGHTS, output=str(folder), opts=opts, **flags
        )
    except TypeError as error:
        raise UserError(f"Detector.train: {error}") from error
    own = build_config(asked)
    setup(own, asked)
    with removes_empty_run(folder):
        train(own)
    return Run.open(folder, device=cfg.MODEL.DEVICE)


def evaluate_detector(cfg: CfgNode, data: str, images: str) -> dict[str, float]:
    """Evaluates the weights of a config on other data, see ``Detector.evaluate``."""
    with tempfile.TemporaryDirectory(prefix="qbheat_evaluate_") as folder:
        asked = RunFlags(
            data=data,
            images=images or (),
            weights=cfg.MODEL.WEIGHTS,
            output=folder,
            eval_only=True,
            opts=["MODEL.DEVICE", cfg.MODEL.DEVICE],
        )
        results: dict[str, float] = evaluate(build_config(asked))["bbox"]
    return results


def _find_free(folder: Path) -> Path:
    """Returns ``folder``/train, or the first of train-2, train-3, … that does not exist."""
    names = (folder / ("train" if number == 1 else f"train-{number}") for number in range(1, 10**6))
    return next(path for path in names if not path.exists())

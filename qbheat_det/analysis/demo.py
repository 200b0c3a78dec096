# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The demo: QB-Heat without labels, then detectors on its frozen and on a random backbone."""

import argparse
import logging
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_duration
from qbheat_det.engine import Trainer, build_config, setup

from . import load_figures
from .figure import FigureOptions
from .report import build_report
from .run import Run

NOTE = (
    "One seed, minutes of training and a few hundred images: AP that differs by a point or two "
    "between the backbones may be noise, and so may the order. docs/results.md has longer runs."
)
_CONFIGS = ("demo/toy_qb_heat.yaml", "demo/toy_probe.yaml")
_FIGURES = ("curves", "reconstructions", "spectrum", "detections")
_NUM_RECALIBRATED = 400  # whole images for BatchNorm's statistics
_MARKER = ".of_the_demo"  # in folders that the next demo may remove


def run_demo(
    output: Path,
    export_backbone: Callable[..., object],
    *,
    pretraining: Sequence[str] = (),
    detection: Sequence[str] = (),
) -> None:
    """Trains, evaluates, and writes ``report.html``.

    Args:
        output: folder of everything.
        export_backbone: that of ``qbheat_det.export``.
        pretraining: config overrides.
        detection: likewise, of the detectors.

    Raises:
        UserError: the folder has something else in it, or an override is not valid.
    """
    load_figures()
    start, page = time.monotonic(), output / "report.html"
    print("1/4  pre-training without boxes", flush=True)
    trainer = _start_run(_CONFIGS[0], output / "pretraining", pretraining)
    trainer.export("model_random")
    trainer.train()
    paths = {"pre-training": trainer.cfg.OUTPUT_DIR}
    metrics: dict[str, dict[str, float]] = {}
    stems = {"QB-Heat": "model_final", "random": "model_random"}
    for number, (name, stem) in enumerate(stems.items(), start=2):
        print(f"{number}/4  a decoder on the frozen backbone: {name}", flush=True)
        backbone = output / f"backbone_{stem}.safetensors"
        export_backbone(str(output / "pretraining" / f"{stem}.safetensors"), backbone,
                        overwrite=True, num_images=_NUM_RECALIBRATED)  # fmt: skip
        folder = output / f"probe_{name.lower().replace('-', '_')}"
        probe = _start_run(_CONFIGS[1], folder, ["MODEL.WEIGHTS", str(backbone), *detection])
        paths[name], metrics[name] = probe.cfg.OUTPUT_DIR, probe.train().get("bbox", {})
    print("4/4  drawing the report", flush=True)
    runs = [Run.open(path, label=label, device=trainer.cfg.MODEL.DEVICE)
            for label, path in paths.items()]  # fmt: skip
    words = [f"{label}={path}" for label, path in paths.items()]
    command = shlex.join(["python", "tools/report.py", *words, "--only", *_FIGURES])
    build_report(_FIGURES, runs, FigureOptions(), {}, output=page, command=command)
    print("\nCOCO metrics on new images, decoder on a frozen backbone:")
    for name, own in metrics.items():
        print(f"{name:<8} AP {own.get('AP', np.nan):>5.1f}   AP50 {own.get('AP50', np.nan):>5.1f}")
    took = format_duration(time.monotonic() - start)
    print(f"{NOTE}\ntook  {took}\nopen  {page.resolve()}")


def _start_run(config: str, output: Path, opts: Sequence[str]) -> Trainer:
    """Builds the trainer of a run in an empty folder."""
    if output.exists() and any(output.iterdir()) and not (output / _MARKER).is_file():
        raise UserError(f"'{output}' is not of the demo: use another --output")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    (output / _MARKER).touch()
    args = argparse.Namespace(
        config_file=get_config_path(config),
        opts=["OUTPUT_DIR", str(output), *opts],
        **dict.fromkeys(("eval_only", "resume"), False),
        **dict.fromkeys(("train_json", "train_images", "val_json", "val_images")),
    )
    cfg = build_config(args)
    for name in ("detectron2", "fvcore", "qbheat_det"):
        logging.getLogger(name).handlers.clear()  # of the run before
    setup(cfg, args)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    return trainer

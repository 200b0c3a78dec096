# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The demo: QB-Heat without labels, then detectors on its frozen and on a random backbone."""

import argparse
import contextlib
import io
import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.detection_utils import annotations_to_instances
from detectron2.engine import HookBase

from qbheat_det.checkpoint import load_run_config
from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Image
from qbheat_det.core.text import format_duration
from qbheat_det.engine import Trainer, build_config, setup
from qbheat_det.engine.media import read_bgr, write_image
from qbheat_det.engine.predict import build_predictor

from . import load_figures
from .box_drawing import add_heading, draw_instances, tile_images
from .demo_report import NOTE, PRETRAINED, RANDOM, DemoReport, Probe, build_page, list_scores
from .page import write_page

CONFIGS = ("demo/toy_qb_heat.yaml", "demo/toy_probe.yaml")
_NUM_IMAGES = 12
_NUM_RECALIBRATED = 400  # whole images for BatchNorm's statistics
_SCORE_THRESHOLD = 0.2
_MARKER = ".of_the_demo"  # in folders that the next demo may remove
_PERIOD = 10.0  # seconds between two lines of progress


class ProgressPrinter(HookBase):
    """Prints the step, the loss and the time left every few seconds."""

    def before_train(self) -> None:
        self._start = self._printed = time.monotonic()

    def after_step(self) -> None:
        now = time.monotonic()
        done, total = self.trainer.iter + 1, self.trainer.max_iter
        if now - self._printed >= _PERIOD or done == total:
            self._printed = now
            loss = self.trainer.storage.history("total_loss").median(20)
            left = (now - self._start) / (done - self.trainer.start_iter) * (total - done)
            line = f"step {done:>5,} of {total:,}   loss {loss:.3f}   {format_duration(left)} left"
            print(f"     {line}", flush=True)


class DemoTrainer(Trainer):
    """The package's trainer with ``ProgressPrinter``."""

    def build_hooks(self) -> list[HookBase | None]:
        """Progress comes first, since evaluation is a hook too."""
        return [ProgressPrinter(), *super().build_hooks()]


def run_demo(
    output: Path,
    export_backbone: Callable[..., object],
    *,
    pretraining: Sequence[str] = (),
    detection: Sequence[str] = (),
) -> None:
    """Trains, evaluates, predicts, and writes ``report.html``.

    Args:
        output: folder of everything.
        export_backbone: that of ``qbheat_det.export``.
        pretraining: config overrides of pre-training.
        detection: config overrides of the detectors.

    Raises:
        UserError: the folder has something else in it, or an override is not valid.
    """
    load_figures()  # for the visualizations of pre-training
    start, page = time.monotonic(), output / "report.html"
    if page.exists():
        print(f"{page} exists: training again, and replacing it at the end")
    print(f"1/4  pre-training without boxes (full logs: {output}/*/log.txt)", flush=True)
    trainer = _start_run(CONFIGS[0], output / "pretraining", pretraining)
    trainer.export("model_random")
    trainer.train()
    probes = {}
    stems = {PRETRAINED: "model_final", RANDOM: "model_random"}
    for number, (name, stem) in enumerate(stems.items(), start=2):
        print(f"{number}/4  a decoder on the frozen backbone: {name}", flush=True)
        backbone = output / f"backbone_{stem}.safetensors"
        export_backbone(str(output / "pretraining" / f"{stem}.safetensors"), backbone,
                        overwrite=True, num_images=_NUM_RECALIBRATED)  # fmt: skip
        folder = output / f"probe_{name.lower().replace('-', '_')}"
        probe = _start_run(CONFIGS[1], folder, ["MODEL.WEIGHTS", str(backbone), *detection])
        probes[name] = Probe(probe.cfg, probe.train().get("bbox", {}))
    print(f"4/4  predicting on {_NUM_IMAGES} new images for the report", flush=True)
    cfg = probes[PRETRAINED].cfg
    names = (trainer.cfg.DATASETS.TRAIN[0], cfg.DATASETS.TRAIN[0], cfg.DATASETS.TEST[0])
    unlabelled, train, val = (len(DatasetCatalog.get(name)) for name in names)
    images = _draw_predictions(cfg, output)
    report = DemoReport(
        pretraining=trainer.cfg,
        probes=probes,
        config_files=(get_config_path(CONFIGS[0]), get_config_path(CONFIGS[1])),
        seconds=time.monotonic() - start,
        num_images=(unlabelled, train, val),
        score_threshold=_SCORE_THRESHOLD,
    )
    write_page(build_page(report, images), page)
    print(f"\nCOCO metrics on {val} new images, decoder on a frozen backbone:")
    for name, ap, ap50, _ in list_scores(probes):
        print(f"{name:<8} AP {ap:>5}   AP50 {ap50:>5}")
    print(f"{NOTE}\ntook  {format_duration(report.seconds)}\nopen  {page.resolve()}")


def _start_run(config: str, output: Path, opts: Sequence[str]) -> DemoTrainer:
    """Builds the trainer of a run in an empty folder; only errors of its log are printed."""
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
    with contextlib.redirect_stdout(io.StringIO()) as hidden:
        setup(cfg, args)
    for name in ("detectron2", "fvcore"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is hidden:
                handler.setStream(sys.stdout)
                handler.setLevel(logging.ERROR)
    trainer = DemoTrainer(cfg)
    trainer.resume_or_load(resume=False)
    return trainer


def _draw_predictions(cfg: CfgNode, output: Path) -> list[Image]:
    """Draws predictions beside ground truth on the first test images; writes the files too."""
    weights = str(Path(cfg.OUTPUT_DIR) / "model_final.pth")
    predictor = build_predictor(load_run_config(weights, device=cfg.MODEL.DEVICE))
    names = MetadataCatalog.get(cfg.DATASETS.TEST[0]).thing_classes
    drawn, images = [], []
    for record in DatasetCatalog.get(cfg.DATASETS.TEST[0])[:_NUM_IMAGES]:
        pixels = read_bgr(Path(record["file_name"]))
        found = predictor(pixels)["instances"].to("cpu")
        found = found[found.scores >= _SCORE_THRESHOLD]
        truth = annotations_to_instances(record["annotations"], pixels.shape[:2])
        rgb = np.ascontiguousarray(pixels[:, :, ::-1])
        panels = [
            add_heading(draw_instances(rgb, instances, names), title)
            for title, instances in (("Prediction", found), ("Ground truth", truth))
        ]
        image = tile_images(panels, columns=2, gap=6)
        stem = Path(record["file_name"]).stem
        write_image(output / "images" / f"{stem}.png", image[:, :, ::-1])
        caption = f"Image {stem}: {len(truth)} annotated, {len(found)} predicted"
        images.append(Image.from_rgb(image, alt=caption, caption=caption))
        drawn.append(image)
    write_image(output / "predictions.jpg", tile_images(drawn[:6], columns=2, gap=12)[:, :, ::-1])
    return images

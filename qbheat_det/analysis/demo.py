# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The demo: QB-Heat without labels, then detectors on its frozen and on a random backbone."""

import argparse
import contextlib
import io
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.detection_utils import annotations_to_instances
from detectron2.engine import HookBase

from qbheat_det.checkpoint import load_run_config
from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Image, Table
from qbheat_det.core.text import format_duration
from qbheat_det.engine import Trainer, build_config, setup
from qbheat_det.engine.hooks.visualize import VISUALIZATIONS_DIR
from qbheat_det.engine.media import read_bgr, write_image
from qbheat_det.engine.predict import build_predictor

from . import load_figures
from .box_drawing import add_heading, draw_instances, tile_images
from .page import Fact, Page, Section, write_page
from .plotting import chart_image, list_styles, start_chart, themed
from .run import read_metrics
from .training_log import Curve, read_series

PRETRAINED, RANDOM = "QB-Heat", "random"
NOTE = (
    "One seed, minutes of training and a few hundred images: AP that differs by a point or two "
    "between the backbones may be noise, and so may the order. docs/results.md has longer runs."
)
_CONFIGS = ("demo/toy_qb_heat.yaml", "demo/toy_probe.yaml")
_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
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
    print(f"1/4  pre-training without boxes (full logs: {output}/*/log.txt)", flush=True)
    trainer = _start_run(_CONFIGS[0], output / "pretraining", pretraining)
    trainer.export("model_random")
    trainer.train()
    cfgs: dict[str, CfgNode] = {}
    metrics: dict[str, dict[str, float]] = {}
    stems = {PRETRAINED: "model_final", RANDOM: "model_random"}
    for number, (name, stem) in enumerate(stems.items(), start=2):
        print(f"{number}/4  a decoder on the frozen backbone: {name}", flush=True)
        backbone = output / f"backbone_{stem}.safetensors"
        export_backbone(str(output / "pretraining" / f"{stem}.safetensors"), backbone,
                        overwrite=True, num_images=_NUM_RECALIBRATED)  # fmt: skip
        folder = output / f"probe_{name.lower().replace('-', '_')}"
        probe = _start_run(_CONFIGS[1], folder, ["MODEL.WEIGHTS", str(backbone), *detection])
        cfgs[name], metrics[name] = probe.cfg, probe.train().get("bbox", {})
    print(f"4/4  predicting on {_NUM_IMAGES} new images for the report", flush=True)
    images = _draw_predictions(cfgs[PRETRAINED], output)
    write_page(build_page(trainer.cfg, cfgs, metrics, images), page)
    print("\nCOCO metrics on new images, decoder on a frozen backbone:")
    for name, own in metrics.items():
        print(f"{name:<8} AP {own.get('AP', np.nan):>5.1f}   AP50 {own.get('AP50', np.nan):>5.1f}")
    took = format_duration(time.monotonic() - start)
    print(f"{NOTE}\ntook  {took}\nopen  {page.resolve()}")


def build_page(
    pretraining: CfgNode,
    probes: Mapping[str, CfgNode],
    metrics: Mapping[str, Mapping[str, float]],
    predictions: Sequence[Image],
) -> Page:
    """Returns the page.

    Args:
        pretraining: config; ``OUTPUT_DIR`` has ``metrics.json`` and ``visualizations``.
        probes: configs of the detectors by backbone, equal but for the weights.
        metrics: of the detectors' boxes, in percent.
        predictions: of the detector on ``PRETRAINED`` beside ground truth.
    """
    cfg = probes[PRETRAINED]
    names = (pretraining.DATASETS.TRAIN[0], cfg.DATASETS.TRAIN[0], cfg.DATASETS.TEST[0])
    unlabelled, train, val = (len(DatasetCatalog.get(name)) for name in names)
    curves = {name: _read(one, "bbox/AP50") for name, one in probes.items()}
    losses = {view: _read(pretraining, f"reconstruction/loss_{view}")
              for view in ("corner", "centre")}  # fmt: skip
    rows = [(name, *(f"{own.get(key, np.nan):.1f}" for key in _METRICS))
            for name, own in metrics.items()]  # fmt: skip
    train_net = "python tools/train_net.py --config-file"
    configs = [get_config_path(name) for name in _CONFIGS]
    return Page(
        title="Pre-trained without labels, frozen, and trained to detect",
        lead=f"A small Mobile-Former was pre-trained with QB-Heat on {unlabelled:,} images without "
        f"boxes. Then it was frozen, and the decoder of {cfg.MODEL.META_ARCHITECTURE} was trained "
        f"on {train:,} images with boxes; so was the same decoder on the same backbone with random "
        f"weights. Both were evaluated on {val:,} new images.",
        facts=[Fact(f"{own.get('AP50', np.nan):.1f}", f"AP50, {name}", "frozen backbone")
               for name, own in metrics.items()],
        sections=[
            Section("Is the pre-trained backbone better?", [NOTE],
                    _plot(curves, "AP50 (%)", "AP50 on the new images during training."),
                    Table(("Frozen backbone", *_METRICS), rows)),
            Section("Reconstructions",
                    ["The encoder sees one quarter of the image; linear models propagate its "
                     "features to the others, and a small decoder turns them into pixels."],
                    [*_find_visualizations(pretraining, "reconstructions"),
                     *_plot(losses, "loss", "Loss on the masked positions of new images.")]),
            Section("Spectrum of the linear models",
                    ["Magnitudes of the eigenvalues of A (along x) and B (along y); in grey, "
                     "matrices with the same singular values in random directions."],
                    _find_visualizations(pretraining, "spectrum")),
            Section("Predictions on new images",
                    [f"The first images of the set; boxes of score {_SCORE_THRESHOLD} or more."],
                    predictions),
            Section("The same by hand", code=[
                f"{train_net} {configs[0]}",
                f"{train_net} {configs[1]} MODEL.WEIGHTS "
                f"{pretraining.OUTPUT_DIR}/model_final.safetensors",
                f"python tools/predict.py --weights {cfg.OUTPUT_DIR}/model_final.pth "
                "--input photo.jpg --output images",
            ]),
        ],
        footer="Written by tools/demo.py of qbheat_det.",
    )  # fmt: skip


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
        drawn.append(tile_images(panels, columns=2, gap=6))
        stem = Path(record["file_name"]).stem
        write_image(output / "images" / f"{stem}.png", drawn[-1][:, :, ::-1])
        caption = f"Image {stem}: {len(truth)} annotated, {len(found)} predicted"
        images.append(Image.from_rgb(drawn[-1], alt=caption, caption=caption))
    write_image(output / "predictions.jpg", tile_images(drawn[:6], columns=2, gap=12)[:, :, ::-1])
    return images


def _find_visualizations(cfg: CfgNode, name: str) -> list[Image]:
    """Returns the images of a figure that the run drew last, if any."""
    media_types = {".svg": "image/svg+xml", ".png": "image/png", ".jpg": "image/jpeg"}
    paths = [path for path in (Path(cfg.OUTPUT_DIR) / VISUALIZATIONS_DIR).glob(f"{name}_*")
             if path.suffix in media_types]  # fmt: skip
    last = max((int(path.stem.rsplit("_", 1)[-1]) for path in paths), default=0)
    return [
        Image(path.read_bytes(), media_types[path.suffix], name, f"After {last:,} steps.")
        for path in sorted(paths)
        if int(path.stem.rsplit("_", 1)[-1]) == last
    ]


def _read(cfg: CfgNode, key: str) -> Curve:
    path = Path(cfg.OUTPUT_DIR) / "metrics.json"
    return read_series(read_metrics(path) if path.is_file() else [], key)


@themed
def _plot(curves: Mapping[str, Curve], label: str, caption: str) -> list[Image]:
    """Returns a chart; none if there are fewer than two points."""
    if not any(len(x) > 1 for x, _ in curves.values()):
        return []
    figure, axes = start_chart(height=3.2)
    for (name, (x, values)), style in zip(curves.items(), list_styles(len(curves)), strict=True):
        axes.plot(x, values, label=name, **style)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("iteration")
    axes.set_ylabel(label)
    axes.legend()
    return [chart_image(figure, caption=caption)]

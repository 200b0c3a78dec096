# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The page of ``make demo``: a pre-training, and detectors on its frozen and a random backbone."""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from detectron2.config import CfgNode

from qbheat_det.core.figures import Image, Table
from qbheat_det.core.text import format_duration
from qbheat_det.engine.hooks.visualize import VISUALIZATIONS_DIR
from qbheat_det.engine.run_record import list_versions

from .page import Fact, Page, Section
from .plotting import chart_image, list_styles, start_chart, themed
from .run import read_metrics
from .training_log import read_series

PRETRAINED, RANDOM = "QB-Heat", "random"
NOTE = (
    "One seed, minutes of training and a few hundred images: AP that differs by a point or two "
    "between the backbones may be noise, and so may the order. docs/results.md has longer runs."
)
_METRICS = {"AP": "IoU 0.50 to 0.95", "AP50": "IoU 0.50", "AP75": "IoU 0.75"}
_SIZES = {"APs": "small (below 32² pixels)", "APm": "medium", "APl": "large (96² or more)"}


@dataclass(frozen=True)
class Probe:
    """A detector trained on a frozen backbone: its config, and the metrics of its boxes."""

    cfg: CfgNode
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class DemoReport:
    """What the page shows.

    Attributes:
        pretraining: config; ``OUTPUT_DIR`` has ``metrics.json`` and ``visualizations``.
        probes: ``PRETRAINED`` and ``RANDOM``, trained equally.
        config_files: of pre-training and of the probes.
        seconds: of everything.
        num_images: of pre-training, of the probes' training, and of their evaluation.
        score_threshold: of the drawn boxes.
    """

    pretraining: CfgNode
    probes: Mapping[str, Probe]
    config_files: tuple[str, str]
    seconds: float
    num_images: tuple[int, int, int]
    score_threshold: float


def build_page(report: DemoReport, predictions: Sequence[Image]) -> Page:
    """Returns the page; ``predictions`` show those of ``PRETRAINED`` beside ground truth."""
    unlabelled, train, val = report.num_images
    head = report.probes[PRETRAINED].cfg.MODEL.META_ARCHITECTURE
    _, losses = _read(report.pretraining, "reconstruction/loss")
    facts = [
        Fact(_percent(probe.metrics.get("AP50")), f"AP50, {name}", "frozen backbone")
        for name, probe in report.probes.items()
    ]
    if losses:
        facts.append(Fact(f"{losses[-1]:.3f}", "Held-out loss", "1 for a prediction of zero"))
    return Page(
        title="Pre-trained without labels, frozen, and trained to detect",
        lead=f"A small Mobile-Former was pre-trained with QB-Heat on {unlabelled:,} images without "
        f"their boxes, to predict three quarters of an image from the fourth. Then it was frozen, "
        f"and {head}'s decoder was trained on {train:,} images with boxes; so was the same decoder "
        f"on the same backbone with random weights. Both were evaluated on {val:,} new images.",
        facts=[
            *facts,
            Fact(f"{report.pretraining.SOLVER.MAX_ITER:,}", "Steps of pre-training"),
            Fact(format_duration(report.seconds), "Wall time"),
        ],
        sections=_build_sections(report, predictions),
        footer="Written by tools/demo.py of qbheat_det.",
    )


def list_scores(probes: Mapping[str, Probe]) -> list[tuple[str, ...]]:
    """Returns a row for each backbone: its name, AP, AP50 and AP75, as text."""
    return [
        (name, *(_percent(probe.metrics.get(key)) for key in _METRICS))
        for name, probe in probes.items()
    ]


def _build_sections(report: DemoReport, predictions: Sequence[Image]) -> list[Section]:
    probe, pretraining = report.probes[PRETRAINED], report.pretraining
    curves = {name: _read(one.cfg, "bbox/AP50") for name, one in report.probes.items()}
    losses = {view: _read(pretraining, f"reconstruction/loss_{view}")
              for view in ("corner", "centre")}  # fmt: skip
    classes = {key: key[3:] for key in probe.metrics if key.startswith("AP-")}
    configs = [os.path.relpath(path) for path in report.config_files]
    rows = [(label, *(_percent(one.metrics.get(key)) for one in report.probes.values()))
            for key, label in {**classes, **_SIZES}.items()]  # fmt: skip
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    versions = {**list_versions(), "device": gpu, "threads": str(torch.get_num_threads())}
    header = ("Frozen backbone", *(f"{key} ({note})" for key, note in _METRICS.items()))
    return [
        Section(
            "Is the pre-trained backbone better?",
            [NOTE],
            _plot(curves, "AP50 (%)", "AP50 on the new images while the decoders were trained."),
            Table(header, list_scores(report.probes)),
        ),
        Section(
            "Reconstructions",
            [
                "The encoder sees only one quarter of the image. Linear models propagate its "
                "features to the masked quarters, and a small transformer decodes them to pixels."
            ],
            [*_find_visualizations(pretraining, "reconstructions"),
             *_plot(losses, "loss", "Loss on the masked positions of new images.")],
        ),
        Section(
            "Spectrum of the linear models",
            [
                "Magnitudes of the eigenvalues of A (along x) and B (along y), learned over half "
                "an image and over a quarter; in grey, matrices with the same singular values in "
                "random directions."
            ],
            _find_visualizations(pretraining, "spectrum"),
        ),
        Section(
            "Predictions on new images",
            [
                f"The first {len(predictions)} images of {probe.cfg.DATASETS.TEST[0]}, not "
                f"selected. Boxes with a score of {report.score_threshold} or more are drawn."
            ],
            predictions,
        ),
        Section("AP by class and size", table=Table(("Objects", *report.probes), rows)),
        Section(
            "The same by hand",
            ["Pre-train; train the decoder on the frozen backbone; predict:"],
            code=[
                f"python tools/train_net.py --config-file {configs[0]}",
                f"python tools/train_net.py --config-file {configs[1]} MODEL.WEIGHTS "
                f"{pretraining.OUTPUT_DIR}/model_final.safetensors",
                f"python tools/predict.py --weights {probe.cfg.OUTPUT_DIR}/model_final.pth "
                "--input photo.jpg --output images",
            ],
        ),
        Section("Environment", table=Table(("Component", "Version"), list(versions.items()))),
    ]  # fmt: skip


def _find_visualizations(cfg: CfgNode, name: str) -> list[Image]:
    """Returns the images of a figure that the run drew last, if any."""
    media_types = {".svg": "image/svg+xml", ".png": "image/png", ".jpg": "image/jpeg"}
    by_steps: dict[int, list[Path]] = {}
    for path in sorted((Path(cfg.OUTPUT_DIR) / VISUALIZATIONS_DIR).glob(f"{name}_*")):
        if path.suffix in media_types:
            by_steps.setdefault(int(path.stem.rsplit("_", 1)[-1]), []).append(path)
    return [
        Image(path.read_bytes(), media_types[path.suffix], name, f"After {steps:,} steps.")
        for steps in sorted(by_steps)[-1:]
        for path in by_steps[steps]
    ]


def _read(cfg: CfgNode, key: str) -> tuple[list[float], list[float]]:
    path = Path(cfg.OUTPUT_DIR) / "metrics.json"
    return read_series(read_metrics(path) if path.is_file() else [], key)


@themed
def _plot(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], label: str, caption: str
) -> list[Image]:
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


def _percent(value: float | None) -> str:
    return "n/a" if value is None or math.isnan(value) else f"{value:.1f}"

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""From a finished run to its report: figures, pictures, curves, AP per class, commands."""

import importlib.metadata
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from detectron2.config import CfgNode

from .charts import plot_class_ap, plot_curve, read_metrics, select_series
from .html_report import Picture, Report, Section, SummaryFigure, Table


@dataclass(frozen=True)
class Run:
    """What is known once a detector is trained and evaluated.

    Attributes:
        cfg: resolved config; ``OUTPUT_DIR`` holds ``metrics.json``.
        config_file: the YAML that it came from.
        metrics: of the boxes, in percent: ``AP``, ``AP50``, …, ``AP-<class>``.
        seconds: wall time of everything.
        num_parameters: of the model.
        num_train: images trained on.
        num_val: images evaluated on.
        score_threshold: of the boxes in the pictures.
    """

    cfg: CfgNode
    config_file: str
    metrics: Mapping[str, float]
    seconds: float
    num_parameters: int
    num_train: int
    num_val: int
    score_threshold: float


def describe_run(run: Run, pictures: Sequence[Picture]) -> Report:
    """Returns the report of a run; ``pictures`` show predictions beside ground truth."""
    cfg = run.cfg
    sections = [
        Section(
            "Predictions on unseen images",
            paragraphs=[
                f"The first {len(pictures)} images of {cfg.DATASETS.TEST[0]}, not chosen by "
                f"hand. Boxes with a score of {run.score_threshold} or more are drawn."
            ],
            pictures=pictures,
        ),
        _describe_training(cfg),
        _describe_classes(run.metrics),
        _list_commands(run),
        Section("Environment", table=_list_environment()),
    ]
    origin = Path(cfg.MODEL.WEIGHTS).name if cfg.MODEL.WEIGHTS else "random weights"
    return Report(
        title=f"A detector trained from {origin}",
        lead=f"{cfg.MODEL.META_ARCHITECTURE} on {_backbone_name(cfg)}, trained on "
        f"{run.num_train:,} images of {cfg.DATASETS.TRAIN[0]} and evaluated with the COCO metrics "
        f"on {run.num_val:,} images that it has not seen.",
        figures=_list_figures(run),
        sections=[section for section in sections if section],
        footer="Written by tools/demo.py of qbheat_det.",
    )


def format_duration(seconds: float) -> str:
    """Returns ``"6 min 12 s"``, or ``"12 s"`` below a minute."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _backbone_name(cfg: CfgNode) -> str:
    name: str = cfg.MODEL.BACKBONE.NAME
    if "mobile_former" in name or name == "MobileFormer":
        variant = cfg.MODEL.MOBILE_FORMER.VARIANT
        return "a small Mobile-Former" if variant == "custom" else f"Mobile-Former {variant}"
    return name


def _list_figures(run: Run) -> list[SummaryFigure]:
    return [
        SummaryFigure(_percent(run.metrics.get("AP")), "AP", "IoU 0.50 to 0.95"),
        SummaryFigure(_percent(run.metrics.get("AP50")), "AP50", "IoU 0.50"),
        SummaryFigure(_percent(run.metrics.get("AP75")), "AP75", "IoU 0.75"),
        SummaryFigure(_in_millions(run.num_parameters), "Parameters"),
        SummaryFigure(f"{run.cfg.SOLVER.MAX_ITER:,}", "Steps", _batch(run.cfg)),
        SummaryFigure(f"{run.seconds / 60:.1f} min", "Wall time", "training to report"),
    ]


def _batch(cfg: CfgNode) -> str:
    return f"of {cfg.SOLVER.IMS_PER_BATCH} images"


def _describe_training(cfg: CfgNode) -> Section | None:
    path = Path(cfg.OUTPUT_DIR) / "metrics.json"
    records = read_metrics(path) if path.is_file() else []
    pictures = []
    for keys, label, caption in (
        (["total_loss"], "loss", "Training loss, median of 20 steps."),
        (["bbox/AP", "bbox/AP50"], "%", "AP and AP50 on the unseen images, as training went on."),
    ):
        iterations, values = select_series(records, keys)
        if len(iterations) < 2:
            continue
        named = {key.removeprefix("bbox/"): line for key, line in values.items()}
        light, dark = (
            plot_curve(iterations, named, label=label, theme=theme) for theme in ("light", "dark")
        )
        pictures.append(Picture(light, "image/svg+xml", alt=caption, caption=caption, dark=dark))
    return Section("Training", pictures=pictures) if pictures else None


def _describe_classes(metrics: Mapping[str, float]) -> Section | None:
    if not any(key.startswith("AP-") for key in metrics):
        return None
    caption = "AP of each class, averaged over IoU 0.50 to 0.95."
    light, dark = (plot_class_ap(metrics, theme=theme) for theme in ("light", "dark"))
    sizes = (("APs", "small (below 32² pixels)"), ("APm", "medium"), ("APl", "large (96² or more)"))
    rows = [(name, _percent(metrics.get(key))) for key, name in sizes]
    return Section(
        "AP by class and size",
        pictures=[Picture(light, "image/svg+xml", alt=caption, caption=caption, dark=dark)],
        table=Table(("Objects", "AP"), rows),
    )


def _list_commands(run: Run) -> Section:
    weights = os.path.join(run.cfg.OUTPUT_DIR, "model_final.pth")
    config_file = os.path.relpath(run.config_file)
    return Section(
        "The same by hand",
        paragraphs=["Train and evaluate; predict on pictures of your own:"],
        commands=[
            f"python tools/train_net.py --config-file {config_file}",
            f"python tools/predict.py --weights {weights} --input photo.jpg --output pictures",
        ],
    )


def _list_environment() -> Table:
    packages = ("qbheat_det", "detectron2", "torch", "torchvision")
    rows = [(name, _version(name)) for name in packages]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    rows += [
        ("Python", platform.python_version()),
        ("System", f"{platform.system()} {platform.machine()}"),
        ("Device", f"{device}, {torch.get_num_threads()} threads"),
    ]
    return Table(("Component", "Version"), rows)


def _version(package: str) -> str:
    for name in (package, package.replace("_", "-")):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    module = importlib.import_module(package)  # on the path without being installed
    return str(getattr(module, "__version__", "unknown"))


def _percent(value: float | None) -> str:
    return "n/a" if value is None or math.isnan(value) else f"{value:.1f}"


def _in_millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"

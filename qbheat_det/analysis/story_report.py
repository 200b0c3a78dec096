# Copyright (c) qbheat_det contributors. Apache-2.0.
"""From pre-training to two frozen detectors: the report that ``make demo`` ends with."""

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

PRETRAINED, RANDOM = "QB-Heat", "random"
HOW_TO_READ = (
    "One seed, minutes of training and a few hundred images: AP that differs by a point or two "
    "between the backbones may be noise, and so may the order. docs/results.md has longer runs."
)
_METRICS = {"AP": "IoU 0.50 to 0.95", "AP50": "IoU 0.50", "AP75": "IoU 0.75"}


@dataclass(frozen=True)
class Probe:
    """A decoder that was trained on a frozen backbone.

    Attributes:
        cfg: resolved config; ``OUTPUT_DIR`` holds ``metrics.json``.
        metrics: of the boxes, in percent: ``AP``, ``AP50``, …, ``AP-<class>``.
    """

    cfg: CfgNode
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Story:
    """What is known once a backbone is pre-trained and judged beside a random one.

    Attributes:
        pretraining: resolved config; ``OUTPUT_DIR`` holds ``metrics.json`` and ``looks``.
        probes: ``PRETRAINED`` and ``RANDOM``, trained alike.
        config_files: the two YAML files, of pre-training and of the probes.
        seconds: wall time of everything.
        num_unlabelled: images of pre-training.
        num_train: images that the decoders were trained on.
        num_val: images evaluated on.
        score_threshold: of the boxes in the pictures.
    """

    pretraining: CfgNode
    probes: Mapping[str, Probe]
    config_files: tuple[str, str]
    seconds: float
    num_unlabelled: int
    num_train: int
    num_val: int
    score_threshold: float


def describe_story(story: Story, pictures: Sequence[Picture]) -> Report:
    """Returns the report; ``pictures`` show predictions of the pre-trained one beside truth."""
    probe = story.probes[PRETRAINED].cfg
    sections = [
        _compare_probes(story),
        _show_reconstructions(story),
        _show_spectrum(story),
        Section(
            "Predictions on unseen images",
            paragraphs=[
                f"The decoder on the pre-trained backbone; the first {len(pictures)} images of "
                f"{probe.DATASETS.TEST[0]}, not chosen by hand. Boxes with a score of "
                f"{story.score_threshold} or more are drawn."
            ],
            pictures=pictures,
        ),
        _compare_classes(story),
        _list_commands(story),
        Section("Environment", table=_list_environment()),
    ]
    return Report(
        title="Pre-trained without labels, frozen, and asked to detect",
        lead=f"A small Mobile-Former saw {story.num_unlabelled:,} pictures without their boxes and "
        "learned, with QB-Heat, to tell three quarters of a picture from the fourth. Then it was "
        f"frozen, and {probe.MODEL.META_ARCHITECTURE}'s decoder learned from {story.num_train:,} "
        "pictures with boxes; so did the same decoder on the same backbone with random weights. "
        f"Both were evaluated on {story.num_val:,} pictures that neither has seen.",
        figures=_list_figures(story),
        sections=[section for section in sections if section],
        footer="Written by tools/demo.py of qbheat_det.",
    )


def format_duration(seconds: float) -> str:
    """Returns ``"6 min 12 s"``, or ``"12 s"`` below a minute."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def list_scores(probes: Mapping[str, Probe]) -> list[tuple[str, ...]]:
    """Returns a row for each backbone: its name, AP, AP50 and AP75, as text."""
    return [
        (name, *(_percent(probe.metrics.get(key)) for key in _METRICS))
        for name, probe in probes.items()
    ]


def _list_figures(story: Story) -> list[SummaryFigure]:
    figures = [
        SummaryFigure(_percent(probe.metrics.get("AP50")), f"AP50, {name}", "frozen backbone")
        for name, probe in story.probes.items()
    ]
    losses = _read_series(story.pretraining, ["reconstruction/loss"])[1]["reconstruction/loss"]
    if losses:
        figures.append(SummaryFigure(f"{losses[-1]:.3f}", "Held-out loss", "1 is a guess of zero"))
    steps = f"{story.pretraining.SOLVER.MAX_ITER:,}"
    return [
        *figures,
        SummaryFigure(steps, "Steps of pre-training", _batch(story.pretraining)),
        SummaryFigure(f"{story.seconds / 60:.1f} min", "Wall time", "pre-training to report"),
    ]


def _batch(cfg: CfgNode) -> str:
    return f"of {cfg.SOLVER.IMS_PER_BATCH} images"


def _compare_probes(story: Story) -> Section:
    pictures = []
    for key in ("bbox/AP", "bbox/AP50"):
        found = {name: _read_series(probe.cfg, [key]) for name, probe in story.probes.items()}
        iterations = [its for its, _ in found.values()]
        if len(iterations[0]) < 2 or any(other != iterations[0] for other in iterations):
            continue
        metric = key.removeprefix("bbox/")
        lines = {name: values[key] for name, (_, values) in found.items()}
        caption = f"{metric} on the unseen images as the decoders were trained."
        pictures.append(_plot(iterations[0], lines, f"{metric} (%)", caption))
    header = ("Frozen backbone", *(f"{key} ({note})" for key, note in _METRICS.items()))
    return Section(
        "Is the pre-trained backbone the better one?",
        paragraphs=[HOW_TO_READ],
        pictures=pictures,
        table=Table(header, list_scores(story.probes)),
    )


def _show_reconstructions(story: Story) -> Section | None:
    keys = ["reconstruction/loss_corner", "reconstruction/loss_centre"]
    iterations, values = _read_series(story.pretraining, keys)
    pictures = _find_looks(story.pretraining, "reconstructions", ".png")
    if len(iterations) > 1:
        named = {key.rsplit("_", 1)[-1]: line for key, line in values.items()}
        caption = "Loss on the masked positions of unseen images, by what was visible."
        pictures.append(_plot(iterations, named, "loss", caption))
    if not pictures:
        return None
    return Section(
        "What it makes of a quarter of a picture",
        paragraphs=[
            "The encoder sees the visible quarter alone. Linear maps carry its features to the "
            "hidden quarters, and a small transformer decodes them to pixels."
        ],
        pictures=pictures,
    )


def _show_spectrum(story: Story) -> Section | None:
    pictures = _find_looks(story.pretraining, "spectrum", ".svg")
    if not pictures:
        return None
    return Section(
        "Spectrum of the linear maps",
        paragraphs=[
            "Magnitudes of the eigenvalues of A (along x) and B (along y), learned over half an "
            "image and over a quarter of it; in grey matrices of the same singular values in "
            "random directions."
        ],
        pictures=pictures,
    )


def _find_looks(cfg: CfgNode, name: str, suffix: str) -> list[Picture]:
    """Returns the last look of a kind, as a list of at most one picture."""
    paths = sorted((Path(cfg.OUTPUT_DIR) / "looks").glob(f"{name}_*{suffix}"))
    media_type = {".png": "image/png", ".svg": "image/svg+xml"}[suffix]
    return [
        Picture(path.read_bytes(), media_type, alt=name, caption=f"After {steps:,} steps.")
        for path in paths[-1:]
        for steps in [int(path.stem.rsplit("_", 1)[-1])]
    ]


def _compare_classes(story: Story) -> Section | None:
    metrics = story.probes[PRETRAINED].metrics
    names = {key: key[3:] for key in metrics if key.startswith("AP-")}
    if not names:
        return None
    sizes = {"APs": "small (below 32² pixels)", "APm": "medium", "APl": "large (96² or more)"}
    rows = [
        (label, *(_percent(probe.metrics.get(key)) for probe in story.probes.values()))
        for key, label in {**names, **sizes}.items()
    ]
    caption = f"AP of each class on the {PRETRAINED} backbone, averaged over IoU 0.50 to 0.95."
    return Section(
        "AP by class and size",
        pictures=[
            Picture.from_chart(lambda theme: plot_class_ap(metrics, theme=theme), caption=caption)
        ],
        table=Table(("Objects", *story.probes), rows),
    )


def _list_commands(story: Story) -> Section:
    pretraining, probe = story.pretraining, story.probes[PRETRAINED].cfg
    configs = [os.path.relpath(path) for path in story.config_files]
    final = f"{pretraining.OUTPUT_DIR}/model_final.safetensors"
    return Section(
        "The same by hand",
        paragraphs=["Pre-train; train the decoder on the frozen backbone; predict:"],
        commands=[
            f"python tools/train_net.py --config-file {configs[0]}",
            f"python tools/train_net.py --config-file {configs[1]} MODEL.WEIGHTS {final}",
            f"python tools/predict.py --weights {probe.OUTPUT_DIR}/model_final.pth "
            "--input photo.jpg --output pictures",
        ],
    )


def _read_series(cfg: CfgNode, keys: Sequence[str]) -> tuple[list[float], dict[str, list[float]]]:
    path = Path(cfg.OUTPUT_DIR) / "metrics.json"
    return select_series(read_metrics(path) if path.is_file() else [], keys)


def _plot(
    iterations: Sequence[float], lines: Mapping[str, Sequence[float]], label: str, caption: str
) -> Picture:
    return Picture.from_chart(
        lambda theme: plot_curve(iterations, lines, label=label, theme=theme), caption=caption
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

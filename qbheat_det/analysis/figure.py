# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The options of all figures, the loop over runs, and the images that runs share."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import Tensor, nn
from tqdm import tqdm

from qbheat_det.config import with_values
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, Image, NotApplicable, Table
from qbheat_det.core.text import join_first
from qbheat_det.data import MAPPERS_OF_IMAGES, build_mapper
from qbheat_det.engine.data_sources import SpreadEntries, read_spread
from qbheat_det.modeling.contracts import get_backbone, get_encoder, get_pixel_statistics

from .run import Run

logger = logging.getLogger(__name__)

Found = TypeVar("Found")
Entries = list[dict[str, Any]]

_BATCH_SIZE = 32


@dataclass(frozen=True)
class FigureOptions:
    """Options of every figure: a folder of images (None: the run's data), their number, a seed."""

    images: Path | None = None
    num_images: int = 6
    seed: int = 0


@dataclass(frozen=True)
class RunResults(Generic[Found]):
    """Results by label, the reason of each run that is left out, and the files of the images."""

    found: dict[str, Found]
    left_out: list[str]
    files: Sequence[str] = ()
    unreadable: Sequence[str] = ()

    def draw(
        self,
        name: str,
        title: str,
        explanation: Sequence[str],
        images: Mapping[str, Image],
        table: Table | None = None,
        /,
        **data: Any,
    ) -> Figure:
        """Returns a figure that names the images and runs that are left out."""
        text = list(explanation)
        if self.unreadable:
            names = join_first(Path(name).name for name in self.unreadable)
            text.append(f"Unreadable and replaced by the next image: {names}.")
        text += [f"Left out: {'; '.join(self.left_out)}."] if self.left_out else []
        data = {"images": self.files, **data, "left_out": self.left_out}
        return Figure(name, title, text, images, data, table)


def run_each(
    runs: Sequence[Run],
    compute: Callable[[Run], Found],
    *,
    nothing: str,
    needs_weights: bool = True,
) -> RunResults[Found]:
    """Calls a function for each run and leaves out runs for which it fails.

    Raises:
        UserError: if no run is left and at least one raised a ``UserError``. The message begins
            with ``nothing``, such as "no reconstructions".
        NotApplicable: if no run is left, otherwise.
    """
    found: dict[str, Found] = {}
    left_out, errors = [], []
    for run in runs:
        try:
            if needs_weights:
                _ = run.weights
            found[run.label] = compute(run)
        except (NotApplicable, UserError) as reason:
            text, label = str(reason), f"'{run.label}'"
            left_out.append(text if label in text else f"{label}: {text}")
            errors += [left_out[-1]] if isinstance(reason, UserError) else []
    left_out = list(dict.fromkeys(left_out))
    if not found:
        message = f"{nothing}: {'; '.join(left_out)}"
        raise UserError(message) if errors else NotApplicable(message)
    for error_text in errors:
        logger.warning("left out: %s", error_text)
    return RunResults(found, left_out)


def run_on_images(
    runs: Sequence[Run],
    compute: Callable[[Run, list[str]], Found],
    options: FigureOptions,
    *,
    nothing: str,
    number: int | None = None,
) -> RunResults[Found]:
    """Calls ``run_each`` with the same image files for all runs, by default ``num_images``."""
    entries = choose_images(runs, number or options.num_images, options.images)
    files = [str(entry["file_name"]) for entry in entries]
    results = run_each(runs, lambda run: compute(run, files), nothing=nothing)
    return replace(results, files=files, unreadable=entries.unreadable)


def choose_images(runs: Sequence[Run], number: int, folder: Path | None) -> SpreadEntries:
    """Returns images of a folder, or else of the data of the first run whose data can be read.

    Raises:
        NotApplicable: if no run has data on this machine.
        UserError: if no image of the folder can be read.
    """
    reasons: dict[str, None] = {}
    for run in runs:
        try:
            return run.load_images(number, folder)
        except (NotApplicable, UserError) as reason:
            reasons[str(reason)] = None
    message = "; ".join(reasons)
    raise UserError(message) if folder else NotApplicable(message)


def crop_squares(cfg: CfgNode, files: Sequence[str], size: int | None = None) -> Entries:
    """Returns entries with "image" (3, S, S), cropped by the run's or pre-training's mapper."""
    cfg = with_values(cfg)
    if cfg.INPUT.DATASET_MAPPER_NAME not in MAPPERS_OF_IMAGES:
        cfg.INPUT.DATASET_MAPPER_NAME = "pretrain"
    if size is not None:
        cfg.INPUT.PRETRAIN.SIZE = size
    records = [{"file_name": name} for name in files]
    return read_spread(records, build_mapper(cfg, is_train=False), len(records))


def find_size(runs: Sequence[Run], default: int) -> int:
    """Returns the image side in pixels of the first run that takes square images."""
    for run in runs:
        with contextlib.suppress(NotApplicable, UserError):  # reported where the run is used
            if run.kind != "detector":
                return int(run.cfg.INPUT.PRETRAIN.SIZE)
    return default


def batch_images(model: nn.Module, entries: Entries, label: str) -> Iterator[Tensor]:
    """Yields normalized images (n, 3, S, S) on the model's device; shows a bar if it takes long."""
    statistics = get_pixel_statistics(model)
    mean, std = (statistics[name].view(-1, 1, 1) for name in ("pixel_mean", "pixel_std"))
    starts = range(0, len(entries), _BATCH_SIZE)
    for start in tqdm(starts, unit="batch", desc=label, delay=2, leave=False):
        images = torch.stack([entry["image"] for entry in entries[start : start + _BATCH_SIZE]])
        yield (images.to(mean.device) - mean) / std


def find_encoder(model: nn.Module) -> Backbone:
    """Returns the backbone below a model's feature pyramid; ``NotApplicable`` without one."""
    backbone = get_backbone(model)
    if backbone is None:
        raise NotApplicable(f"{type(model).__name__} has no backbone")
    return get_encoder(backbone)

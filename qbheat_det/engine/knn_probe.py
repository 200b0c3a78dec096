# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Nearest-neighbour scores of backbones, trained or random, of any config."""

import heapq
import itertools
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import Tensor
from tqdm import tqdm

from qbheat_det.checkpoint import bare_backbone, find_unbuilt, fit_weights, read_weights
from qbheat_det.data import (
    ImageBatches,
    PretrainingMapper,
    load_image_folders,
    preserved_randomness,
    unite_labels,
)
from qbheat_det.errors import UserError
from qbheat_det.evaluation import KnnScore, extract_features, score_neighbours

from .backbone_export import build_bare_backbone
from .broken_images import name_faults
from .recalibrate import recalibrate_bn

logger = logging.getLogger(__name__)
_DELAY = 2.0  # seconds without a bar


@dataclass(frozen=True)
class ProbeRow:
    """One score.

    Attributes:
        backbone: file of its weights, or "random, seed 1".
        recalibrated: whole images that BatchNorm's statistics were estimated on; 0 where they are
            as stored.
        score: what came out.
    """

    backbone: str
    recalibrated: int
    score: KnnScore

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it, flat."""
        return {
            "backbone": self.backbone,
            "recalibrated": self.recalibrated,
            **self.score.to_dict(),
            "num_images": self.score.num_images,
        }


class KnnProbe:
    """Scores backbones of one config on the same images, which are decoded once if memory allows.

    Images are whole: the largest square in the middle, resized to ``INPUT.PRETRAIN.SIZE``,
    normalised as the config says. Their feature is the mean over a map's positions.

    Attributes:
        rows: the scores so far.
        feature: name of the map.
    """

    def __init__(
        self,
        cfg: CfgNode,
        train_folder: str,
        val_folder: str,
        *,
        num_recalibrated: int = 0,
        feature: str = "",
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        """
        Args:
            cfg: ``TEST.KNN`` is read too, but for the names of sets.
            train_folder: class folders whose images vote.
            val_folder: class folders whose images are classified.
            num_recalibrated: score each backbone a second time, with BatchNorm's statistics from
                that many whole images of ``train_folder``; not if 0.
            feature: name of the map; by default the backbone's coarsest, of several the last.
            seed: of the draw of images for that.
            progress: show a bar with the time left on stderr.

        Raises:
            UserError: the folders hold no images of classes, or not of the same.
        """
        folders = train_folder, val_folder
        train, val = (load_image_folders([folder], labelled=True) for folder in folders)
        self._cfg = cfg
        self._images = tuple(map(self._load, unite_labels([train], [val], names=folders)))
        chosen = random.Random(seed).sample(range(len(train[0])), len(train[0]))
        self._order = {image_id: place for place, image_id in enumerate(chosen)}
        self._num_recalibrated = num_recalibrated
        self._progress = progress
        self._named = False
        self.feature = feature
        self.rows: list[ProbeRow] = []

    def score_weights(self, weights: str) -> None:
        """Scores the backbone of a file.

        Raises:
            UserError: the file does not fill the backbone of the config.
        """
        backbone = self._build()
        load_backbone(backbone, weights)
        self._score(backbone, weights)

    def score_random(self, seed: int) -> None:
        """Scores a backbone as it is initialised under a seed."""
        with preserved_randomness():
            torch.manual_seed(seed)
            backbone = self._build()
        self._score(backbone, f"random, seed {seed}")

    @property
    def num_broken(self) -> int:
        """Images that were left out."""
        return sum(len(batches.faults) for batches in self._images)

    def _load(self, records: list[dict[str, Any]]) -> ImageBatches:
        return ImageBatches(
            records,
            mapper=PretrainingMapper(self._cfg, is_train=False),
            num_workers=self._cfg.DATALOADER.NUM_WORKERS,
            shared=False,
            memory_gb=self._cfg.INPUT.PRETRAIN.MEMORY_GB / 2,
        )

    def _build(self) -> Backbone:
        backbone = build_bare_backbone(self._cfg).to(self._cfg.MODEL.DEVICE)
        self.feature = find_feature(backbone, self.feature)
        layout = torch.channels_last if self._cfg.MODEL.CHANNELS_LAST else torch.contiguous_format
        return backbone.to(memory_format=layout)

    def _score(self, backbone: Backbone, name: str) -> None:
        backbone.eval()
        self._add(backbone, name, recalibrated=0)
        if not self._num_recalibrated:
            return
        # Of those that can be read, the first in the order drawn; no more of them are held.
        entries = heapq.nsmallest(
            self._num_recalibrated,
            itertools.chain.from_iterable(self._images[0]),
            key=lambda entry: self._order[entry["image_id"]],
        )
        images = [entry["image"] for entry in entries]
        keys = self._cfg.MODEL
        if recalibrate_bn(backbone, images, pixel_mean=keys.PIXEL_MEAN, pixel_std=keys.PIXEL_STD):
            self._add(backbone, name, recalibrated=len(images))

    def _add(self, backbone: Backbone, name: str, *, recalibrated: int) -> None:
        device = next(backbone.parameters()).device
        mean, std = (
            torch.tensor(values, device=device).view(-1, 1, 1)
            for values in (self._cfg.MODEL.PIXEL_MEAN, self._cfg.MODEL.PIXEL_STD)
        )

        def describe(batch: list[dict[str, Any]]) -> Tensor:
            images = torch.stack([entry["image"] for entry in batch]).to(device)
            maps: dict[str, Tensor] = backbone((images - mean) / std)
            return maps[self.feature].mean(dim=(2, 3))

        title = f"{name}{', statistics anew' if recalibrated else ''}"
        train, val = (extract_features(describe, part) for part in self._show(title))
        self._name_broken()
        for aim, (features, _) in {"vote": train, "be classified": val}.items():
            if not len(features):
                raise UserError(f"none of the images that are to {aim} can be read")
        keys = self._cfg.TEST.KNN
        score = score_neighbours(train, val, k=keys.K, temperature=keys.TEMPERATURE)
        self.rows.append(ProbeRow(name, recalibrated, score))

    def _show(self, title: str) -> Iterator[Iterator[list[dict[str, Any]]]]:
        """Yields the batches of both sets, under one bar."""
        total = sum(map(len, self._images))
        with tqdm(
            total=total, desc=title[-40:], unit=" batches", delay=_DELAY, disable=not self._progress
        ) as bar:
            for batches in self._images:
                yield _counted(batches, bar)

    def _name_broken(self) -> None:
        faults = [fault for batches in self._images for fault in batches.faults.values()]
        if faults and not self._named:
            logger.warning(f"Left out, {len(faults):,} in all: {name_faults(faults)}")
        self._named = True


def find_feature(backbone: Backbone, wanted: str = "") -> str:
    """Returns the name of the map to score, see ``KnnProbe``.

    Raises:
        UserError: the backbone has no map of the wanted name.
    """
    strides = {
        name: shape.stride for name, shape in backbone.output_shape().items() if shape.stride
    }
    if wanted and wanted not in strides:
        raise UserError(f"the backbone has no map '{wanted}', but {', '.join(strides)}")
    # Of the coarsest maps the last, which is the deepest.
    return wanted or max(reversed(strides), key=strides.__getitem__)


def load_backbone(backbone: Backbone, weights: str) -> None:
    """Fills a backbone from the weights of any model that has it, or from a bare one.

    Raises:
        UserError: a tensor of it is not in the file, or of another shape, or the file's backbone
            has more.
    """
    state, _ = read_weights(weights)
    names = bare_backbone(state)
    bare = {short: state[name] for name, short in names.items()} if names else state
    unbuilt = find_unbuilt(backbone)
    fitting, report = fit_weights(bare, backbone.state_dict(), file=weights, unbuilt=unbuilt)
    groups = report.groups.values()
    filled, total = report.num_placed, sum(group.num_tensors for group in groups)
    if filled < total or report.left_over:
        more = f", and holds {len(report.left_over)} that it lacks" if report.left_over else ""
        raise UserError(
            f"'{weights}' fills {filled} of the {total} tensors of the config's backbone{more}: "
            "name the config that belongs to these weights with --config-file"
        )
    backbone.load_state_dict(fitting, strict=False)
    logger.info(f"'{weights}': {filled}/{total} backbone tensors")


def _counted(
    batches: Sequence[Any] | ImageBatches, bar: "tqdm[Any]"
) -> Iterator[list[dict[str, Any]]]:
    for batch in batches:
        yield batch
        bar.update()

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probes frozen backbones, trained or random, of any config on the same images."""

import heapq
import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import Tensor
from tqdm import tqdm

from qbheat_det.config import find_memory_format
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import hash_tensors
from qbheat_det.data import (
    ImageBatches,
    PretrainingMapper,
    fingerprint_records,
    join_messages,
    load_class_folders,
    preserved_randomness,
)
from qbheat_det.modeling.backbone.fpn import build_bare_backbone

from .backbones import count_images_seen, find_feature, load_backbone
from .batch_norm import recalibrate_bn
from .features import FrozenFeatures, cache_features
from .probes import ProbeSettings, check_probes, depth_of, run_probe
from .results import ProbeResults, ProbeRow
from .transformer import TransformerSettings

logger = logging.getLogger(__name__)
_DELAY = 2.0  # seconds without a bar
_DIGITS = 12  # of the hash that identifies a backbone's weights


class BackboneProbe:
    """Probes backbones on the same images, which are decoded once if memory allows.

    Images are centre-cropped to a square and resized to ``INPUT.PRETRAIN.SIZE``.

    Attributes:
        results: a row for each backbone and probe.
    """

    def __init__(
        self,
        cfg: CfgNode,
        train_folder: str,
        val_folder: str,
        *,
        probes: Sequence[str] = ("knn", "linear", "tran-1"),
        num_recalibrated: int = 0,
        feature: str = "",
        json_file: Path | None = None,
        seed: int = 0,
        memory_gb: float = 8.0,
        on_row: Callable[[ProbeRow], None] = lambda row: None,
        progress: bool = False,
    ) -> None:
        """
        Args:
            cfg: of backbone and images; ``TEST.KNN`` and ``MODEL.CLASSIFIER.WIDTH`` are read.
            train_folder: class folders whose images the probes learn from.
            val_folder: class folders whose images are classified, once for each row.
            probes: names as in ``PROBES``; "tran-k:width" for another width than
                ``MODEL.CLASSIFIER.WIDTH``.
            num_recalibrated: images of ``train_folder`` to recalibrate BatchNorm on, after which
                each backbone is probed a second time; 0 for no second time.
            feature: name of the feature map; by default the backbone's coarsest, of several the
                last.
            json_file: rewritten after each row; rows that it holds are not computed again.
            seed: of all that the probes draw, and of the images for BatchNorm.
            memory_gb: the most memory of feature maps, in GB; only tran-k keeps them.
            on_row: called with each row as it comes, those of ``json_file`` included.
            progress: show a bar with the time left on stderr.

        Raises:
            UserError: images, ``json_file`` or a name are not sound.
        """
        check_probes(probes)
        folders = train_folder, val_folder
        records = load_class_folders(*folders)
        self._cfg = cfg
        # "tran-1" and "tran-1:width" are one probe where the width is the setting's.
        own = f":{cfg.MODEL.CLASSIFIER.WIDTH}"
        self._probes = list(dict.fromkeys(name.removesuffix(own) for name in probes))
        self._sizes = [len(part) for part in records]
        self._images = tuple(map(self._load, records))
        chosen = random.Random(seed).sample(range(self._sizes[0]), self._sizes[0])
        self._order = {image_id: place for place, image_id in enumerate(chosen)}
        self._num_recalibrated, self._seed = num_recalibrated, seed
        self._memory_gb, self._progress, self._on_row = memory_gb, progress, on_row
        self._feature = find_feature(self._build(), feature)
        self._settings = ProbeSettings(
            num_classes=1 + max(record["label"] for part in records for record in part),
            k=cfg.TEST.KNN.K,
            temperature=cfg.TEST.KNN.TEMPERATURE,
            transformer=TransformerSettings(width=cfg.MODEL.CLASSIFIER.WIDTH),
            seed=seed,
            device=cfg.MODEL.DEVICE,
        )
        setting = self._describe_setting(folders, records)
        self.results = ProbeResults(setting, json_file)
        self._warned = False

    def probe_weights(self, weights: str) -> None:
        """Probes the backbone of a file.

        Raises:
            UserError: the file does not fill the backbone of the config.
        """
        backbone = self._build()
        info = load_backbone(backbone, weights)
        self._probe(backbone, weights, count_images_seen(info))

    def probe_random(self, seed: int) -> None:
        """Probes a backbone as it is initialised under a seed."""
        with preserved_randomness():
            torch.manual_seed(seed)
            backbone = self._build()
        self._probe(backbone, f"random, seed {seed}", 0)

    def _describe_setting(
        self, folders: tuple[str, str], records: Sequence[list[dict[str, Any]]]
    ) -> dict[str, Any]:
        cfg = self._cfg
        return {
            "train_folder": os.path.abspath(folders[0]),
            "val_folder": os.path.abspath(folders[1]),
            "num_images": self._sizes,
            "contents": [fingerprint_records(part) for part in records],
            "feature": self._feature,
            "size": cfg.INPUT.PRETRAIN.SIZE,
            "pixels": [cfg.INPUT.FORMAT, list(cfg.MODEL.PIXEL_MEAN), list(cfg.MODEL.PIXEL_STD)],
            "recalibrate_bn": self._num_recalibrated,
            **self._settings.to_dict(),
        }

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
        return backbone.to(memory_format=find_memory_format(self._cfg))

    def _probe(self, backbone: Backbone, name: str, images_seen: int | None) -> None:
        backbone.eval()
        known = name, hash_tensors(backbone.state_dict())[:_DIGITS]
        for anew in (False, True)[: 2 if self._num_recalibrated else 1]:
            rows = {probe: self.results.find((*known, anew, probe)) for probe in self._probes}
            for old in filter(None, rows.values()):
                self._on_row(old)
            missing = [probe for probe, old in rows.items() if old is None]
            if not missing:
                continue
            recalibrated = self._recalibrate(backbone) if anew else 0
            if anew and not recalibrated:  # no BatchNorm, so nothing would differ
                continue
            train, val = self._extract(
                backbone,
                f"{name}{', BatchNorm recalibrated' if anew else ''}",
                keep_maps=any(map(depth_of, missing)),
            )
            for probe in missing:
                begin = time.perf_counter()
                score, chosen = run_probe(probe, train, val, settings=self._settings)
                row = ProbeRow(
                    *known,
                    images_seen=images_seen,
                    recalibrated=recalibrated,
                    probe=probe,
                    seconds=round(time.perf_counter() - begin, 2),
                    chosen=chosen,
                    **vars(score),
                )
                self.results.add(row)
                self._on_row(row)

    def _recalibrate(self, backbone: Backbone) -> int:
        """Returns the number of images; 0 for a backbone without BatchNorm."""
        # Of those that can be read, the first in the order drawn; no more of them are held.
        entries = heapq.nsmallest(
            self._num_recalibrated,
            itertools.chain.from_iterable(self._images[0]),
            key=lambda entry: self._order[entry["image_id"]],
        )
        images = [entry["image"] for entry in entries]
        keys = self._cfg.MODEL
        norms = recalibrate_bn(
            backbone, images, pixel_mean=keys.PIXEL_MEAN, pixel_std=keys.PIXEL_STD
        )
        return len(images) if norms else 0

    def _extract(
        self, backbone: Backbone, title: str, *, keep_maps: bool
    ) -> tuple[FrozenFeatures, FrozenFeatures]:
        device = next(backbone.parameters()).device
        mean, std = (
            torch.tensor(values, device=device).view(-1, 1, 1)
            for values in (self._cfg.MODEL.PIXEL_MEAN, self._cfg.MODEL.PIXEL_STD)
        )

        def describe(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
            images = torch.stack([entry["image"] for entry in batch]).to(device)
            bar.update()
            outputs: dict[str, Tensor] = backbone((images - mean) / std)
            return outputs

        total = sum(map(len, self._images))
        with tqdm(
            total=total, desc=title[-40:], unit=" batches", delay=_DELAY, disable=not self._progress
        ) as bar:
            train, val = (
                cache_features(
                    describe,
                    batches,
                    num_images=size,
                    feature=self._feature,
                    keep_maps=keep_maps,
                    memory_gb=self._memory_gb * size / sum(self._sizes),
                )
                for batches, size in zip(self._images, self._sizes, strict=True)
            )
        faults = [fault for batches in self._images for fault in batches.skipped.values()]
        self.results.skipped_images = len(faults)
        if faults and not self._warned:
            logger.warning(f"Left out, {len(faults):,} in all: {join_messages(faults)}")
        self._warned = True
        for flag, features in {"--train-folder": train, "--val-folder": val}.items():
            if not len(features):
                raise UserError(f"no image of {flag} can be read")
        return train, val

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probes frozen backbones, trained or random, of any config on the same images.

Results are rows of a JSON file. The file is rewritten after each row, so that a repeated command
resumes.
"""

import dataclasses
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY, Backbone, build_model
from torch import Tensor
from tqdm import tqdm

from qbheat_det.checkpoint import (
    ExactCheckpointer,
    holds_backbone_alone,
    info_of,
    load_run_config,
)
from qbheat_det.config import find_memory_format
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import hash_tensors, write_atomically
from qbheat_det.core.seeding import preserved_randomness
from qbheat_det.data import (
    DataError,
    ImageBatches,
    PretrainingMapper,
    fingerprint_records,
    join_messages,
    load_class_folders,
)
from qbheat_det.data.image_batches import with_views
from qbheat_det.evaluation import (
    HeldOutLossEvaluator,
    measure_ranks,
    rank_true_class,
    rank_true_classes,
)
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from qbheat_det.modeling.contracts import get_views, normalise_pixels
from qbheat_det.modeling.pretrain import ReconstructionModel

from .features import (
    FrozenFeatures,
    cache_features,
    find_feature,
    load_backbone,
    recalibrate_bn,
)
from .probes import L2_GRID, TransformerSettings, fit_linear_probe, fit_transformer_probe

logger = logging.getLogger(__name__)
Row = dict[str, Any]

PROBES = ("knn", "linear", "tran-1", "tran-4")
"""kNN and the paper's probes. Other "tran-k" are also possible, with k from 1 to 99."""

_TRANSFORMER = re.compile(r"tran-([1-9]\d?)")
_DELAY = 2.0  # seconds before a progress bar appears
_MAX_LOSS_IMAGES = 1024
_DIGITS = 12  # length of the hash of a backbone's weights


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of all probes."""

    num_classes: int
    k: int = 20  # number of nearest neighbors
    temperature: float = 0.07  # temperature of the neighbors' votes
    transformer: TransformerSettings = field(default_factory=TransformerSettings)
    seed: int = 0
    device: str = "cpu"  # training device of tran-k

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings that affect the results."""
        transformer = dataclasses.asdict(self.transformer)
        del transformer["depth"]
        return {
            "num_classes": self.num_classes,
            "seed": self.seed,
            "knn": {"k": self.k, "temperature": self.temperature},
            "linear": {"l2_grid": list(L2_GRID)},
            "tran": transformer,
        }


def run_probe(
    name: str, train: FrozenFeatures, val: FrozenFeatures, *, settings: ProbeSettings
) -> tuple[dict[str, float], dict[str, Any]]:
    """Fits a probe on training images and classifies validation images.

    Returns two dicts. The first has "top1", "top5" and their standard errors, in percent. The
    second describes the selected hyperparameters, as returned by ``fit_linear_probe`` and
    ``fit_transformer_probe``. It is empty for kNN.
    """
    if name == "knn":
        ranks = rank_true_classes(
            (train.pooled, train.labels),
            (val.pooled, val.labels),
            k=settings.k,
            temperature=settings.temperature,
        )
        return measure_ranks(ranks), {}
    if name == "linear":
        linear, chosen = fit_linear_probe(
            train.joined, train.labels, num_classes=settings.num_classes, seed=settings.seed
        )
        logits = linear(val.joined)
    else:
        transformer, chosen = fit_transformer_probe(
            train,
            num_classes=settings.num_classes,
            settings=dataclasses.replace(settings.transformer, depth=find_depth(name)),
            seed=settings.seed,
            device=settings.device,
        )
        logits = transformer(val)
    return measure_ranks(rank_true_class(logits, val.labels)), chosen


def check_probes(names: Sequence[str]) -> None:
    """Raises a ``UserError`` if there is no name, or if a name is not a probe."""
    if not names:
        raise UserError(f"probes are {', '.join(PROBES)}, not none")
    unknown = [name for name in names if name not in ("knn", "linear") and not find_depth(name)]
    if unknown:
        unknown_names = ", ".join(repr(name) for name in unknown)
        raise UserError(f"probes are {', '.join(PROBES)}, not {unknown_names}")


def find_depth(name: str) -> int:
    """Returns k for "tran-k", and 0 for all other names."""
    match = _TRANSFORMER.fullmatch(name)
    return int(match[1]) if match else 0


class BackboneProbe:
    """Probes backbones on the same images, which are decoded once if they fit into memory.

    Images are center-cropped to a square and resized to ``INPUT.PRETRAIN.SIZE``.

    Attributes:
        results: the content of the JSON file. "setting" are the settings that affect results.
            "skipped_images" is the number of unreadable images. "losses" has the result of
            ``measure_held_out_loss`` and the backbone's "digest" for each file with a model that
            reconstructs images. "rows" has one dict per backbone and probe, with these keys:

            - "backbone": a file of weights, or text such as "random, seed 1".
            - "digest": a hash of the backbone's tensors.
            - "images_seen": number of images seen in all its trainings; None if unknown.
            - "recalibrated": number of images that BatchNorm was recalibrated on, or 0.
            - "probe": name of the probe.
            - "top1", "top5": accuracy in percent, and "top1_standard_error", "top5_standard_error".
            - "num_images": number of classified images.
            - "seconds": time of fitting and classifying.
            - "chosen": selected hyperparameters of the probe.
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
        memory_gb: float = 8.0,
        on_row: Callable[[Row], None] = lambda row: None,
    ) -> None:
        """
        Args:
            cfg: config of the backbone and images. ``TEST.KNN``, ``MODEL.CLASSIFIER.WIDTH`` and
                ``SEED`` configure the probes.
            train_folder: class folders on which the probes are trained.
            val_folder: class folders that the probes classify.
            probes: names as in ``PROBES``.
            num_recalibrated: number of training images on which BatchNorm is recalibrated for a
                second row per probe. 0 for no second row.
            feature: name of the feature map, by default the last one with the coarsest stride.
            json_file: file that is rewritten after each row. Existing rows are not recomputed.
            memory_gb: memory limit for feature maps, in GB. Only tran-k keeps feature maps.
            on_row: called with each row, including existing rows of ``json_file``.

        Raises:
            UserError: the images, ``json_file`` or a name is invalid.
        """
        check_probes(probes)
        records = load_class_folders(train_folder, val_folder)
        self._cfg = cfg
        self._probes = list(dict.fromkeys(probes))
        self._val_records = records[1]
        self._sizes = [len(part) for part in records]  # number of training, validation images
        self._images: list[ImageBatches] = []  # training images, validation images
        for part in records:
            batches = ImageBatches(
                part,
                mapper=PretrainingMapper(cfg, is_train=False),
                num_workers=cfg.DATALOADER.NUM_WORKERS,
                shared=False,
            )
            self._images.append(batches)
        self._num_recalibrated = num_recalibrated
        self._memory_gb = memory_gb
        self._on_row = on_row
        self._feature = find_feature(self._build(), feature)
        labels = [record["label"] for part in records for record in part]
        self._settings = ProbeSettings(
            num_classes=1 + max(labels),
            k=cfg.TEST.KNN.K,
            temperature=cfg.TEST.KNN.TEMPERATURE,
            transformer=TransformerSettings(width=cfg.MODEL.CLASSIFIER.WIDTH),
            seed=max(cfg.SEED, 0),
            device=cfg.MODEL.DEVICE,
        )
        setting = {
            "train_folder": os.path.abspath(train_folder),
            "val_folder": os.path.abspath(val_folder),
            "num_images": self._sizes,
            "contents": [fingerprint_records(part) for part in records],
            "feature": self._feature,
            "size": cfg.INPUT.PRETRAIN.SIZE,
            "pixels": [cfg.INPUT.FORMAT, list(cfg.MODEL.PIXEL_MEAN), list(cfg.MODEL.PIXEL_STD)],
            "recalibrate_bn": num_recalibrated,
            **self._settings.to_dict(),
        }
        self._file = json_file
        self.results = _read_results(json_file, setting)

    def probe_weights(self, weights: str) -> None:
        """Trains and evaluates the probes on the backbone in a weights file.

        Raises a ``UserError`` if this backbone does not fit the config.
        """
        backbone = self._build()
        info = load_backbone(backbone, weights)
        self._probe(backbone, weights, info.images_seen if info else None)
        digest = _digest(backbone)
        if self.results["losses"].get(weights, {}).get("digest") == digest:
            return
        loss = measure_held_out_loss(weights, self._val_records, device=self._cfg.MODEL.DEVICE)
        if loss:
            self.results["losses"][weights] = {"digest": digest, **loss}
            self._write()

    def probe_random(self, seed: int) -> None:
        """Probes a backbone with random weights, which ``seed`` determines."""
        with preserved_randomness():
            torch.manual_seed(seed)
            backbone = self._build()
        self._probe(backbone, f"random, seed {seed}", images_seen=0)

    def _build(self) -> Backbone:
        """Builds the config's backbone, without a feature pyramid, with random weights."""
        backbone = build_bare_backbone(self._cfg).to(self._cfg.MODEL.DEVICE)
        return backbone.to(memory_format=find_memory_format(self._cfg))

    def _probe(self, backbone: Backbone, name: str, images_seen: int | None) -> None:
        """Adds the missing rows of a backbone, and then those with recalibrated BatchNorm."""
        backbone.eval()
        digest = _digest(backbone)
        variants = [False]
        if self._num_recalibrated:
            variants = [False, True]
        for is_recalibrated in variants:
            known: dict[tuple[str, bool, str], Row] = {}
            for row in self.results["rows"]:
                if row["digest"] == digest:
                    known[_identify(row)] = row
            missing = []
            for probe in self._probes:
                identity = (name, is_recalibrated, probe)
                if identity in known:
                    self._on_row(known[identity])
                else:
                    missing.append(probe)
            if not missing:
                continue
            num_recalibrated = 0
            if is_recalibrated:
                num_recalibrated = self._recalibrate(backbone)
                if not num_recalibrated:  # without BatchNorm, results would be equal
                    continue
            keep_maps = any(find_depth(probe) for probe in missing)  # only tran-k needs them
            train, val = self._extract(backbone, name, keep_maps=keep_maps)
            for probe in missing:
                begin = time.perf_counter()
                score, chosen = run_probe(probe, train, val, settings=self._settings)
                row = {
                    "backbone": name,
                    "digest": digest,
                    "images_seen": images_seen,
                    "recalibrated": num_recalibrated,
                    "probe": probe,
                    **score,
                    "num_images": len(val),
                    "seconds": round(time.perf_counter() - begin, 2),
                    "chosen": chosen,
                }
                self._add(row)
                self._on_row(row)

    def _add(self, row: Row) -> None:
        """Adds a row, and saves all rows.

        Replaces the row of the same backbone and probe, which is of earlier weights with this name.
        """
        kept_rows = [old for old in self.results["rows"] if _identify(old) != _identify(row)]
        self.results["rows"] = [*kept_rows, row]
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            write_atomically(self._file, json.dumps(self.results, indent=1).encode())

    def _recalibrate(self, backbone: Backbone) -> int:
        """Recalibrates BatchNorm on training images.

        Returns the number of images used, or 0 if the backbone has no BatchNorm.
        """
        # Images are sorted by class. With every n-th image, all classes are sampled.
        step = max(1, self._sizes[0] // self._num_recalibrated)
        entries = itertools.chain.from_iterable(self._images[0])
        chosen = itertools.islice(entries, 0, step * self._num_recalibrated, step)
        images = [entry["image"] for entry in chosen]
        num_norms = recalibrate_bn(
            backbone,
            images,
            pixel_mean=self._cfg.MODEL.PIXEL_MEAN,
            pixel_std=self._cfg.MODEL.PIXEL_STD,
        )
        if not num_norms:
            return 0
        return len(images)

    def _extract(
        self, backbone: Backbone, title: str, *, keep_maps: bool
    ) -> tuple[FrozenFeatures, FrozenFeatures]:
        """Returns the features of the training and validation images."""
        device = next(backbone.parameters()).device
        pixel_mean = self._cfg.MODEL.PIXEL_MEAN
        pixel_std = self._cfg.MODEL.PIXEL_STD

        def describe(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
            images = torch.stack([entry["image"] for entry in batch]).to(device)
            bar.update()
            return backbone(normalise_pixels(images, pixel_mean, pixel_std))

        total = sum(map(len, self._images))
        features: list[FrozenFeatures] = []
        with tqdm(total=total, desc=title[-40:], unit=" batches", delay=_DELAY) as bar:
            for batches, size in zip(self._images, self._sizes, strict=True):
                part = cache_features(
                    describe,
                    batches,
                    num_images=size,
                    feature=self._feature,
                    keep_maps=keep_maps,
                    memory_gb=self._memory_gb * size / sum(self._sizes),
                )
                features.append(part)
        train, val = features
        skipped: list[DataError] = []
        for batches in self._images:
            skipped += batches.skipped.values()
        if skipped and not self.results["skipped_images"]:
            logger.warning(f"Left out, {len(skipped):,} in all: {join_messages(skipped)}")
        self.results["skipped_images"] = len(skipped)
        for flag, part in {"--data": train, "--val": val}.items():
            if not len(part):
                raise UserError(f"no image of {flag} can be read")
        return train, val


def measure_held_out_loss(
    weights: str, records: Sequence[dict[str, Any]], *, device: str
) -> dict[str, float]:
    """Returns the loss of a model that reconstructs masked images, and that of its baselines.

    The results are those of ``HeldOutLossEvaluator``, on up to ``_MAX_LOSS_IMAGES`` of the images,
    and "num_images". The dict is empty if the file has no such model with its config.
    """
    info = info_of(weights)
    if info is None or not info.config or holds_backbone_alone(weights):
        return {}
    cfg = load_run_config(weights, device=device)
    name = cfg.MODEL.META_ARCHITECTURE
    if not issubclass(META_ARCH_REGISTRY.get(name), ReconstructionModel):
        return {}
    model = build_model(cfg).eval()
    try:
        ExactCheckpointer(model).load(weights)
    except UserError as error:
        logger.warning(f"'{weights}' has no loss, only probes of its backbone: {error}")
        return {}
    number = min(len(records), _MAX_LOSS_IMAGES)
    # Evenly spaced, because the records are sorted by class.
    chosen = [records[index * len(records) // number] for index in range(number)]
    batches = ImageBatches(
        with_views(chosen, get_views(cfg).values()),
        mapper=PretrainingMapper(cfg, is_train=False),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        shared=False,
    )
    evaluator = HeldOutLossEvaluator("--val")
    with torch.no_grad():
        for batch in tqdm(batches, desc=f"loss, {weights[-34:]}", unit=" batches", delay=_DELAY):
            evaluator.process(batch, model(batch))
    results = evaluator.evaluate()["reconstruction"]
    return {**results, "num_images": len(chosen) - len(batches.skipped)}


def _digest(backbone: Backbone) -> str:
    """Returns a hash of the backbone's tensors."""
    return hash_tensors(backbone.state_dict())[:_DIGITS]


def _identify(row: Row) -> tuple[str, bool, str]:
    """Returns the backbone, whether it was recalibrated, and the probe, which identify a row."""
    return row["backbone"], bool(row["recalibrated"]), row["probe"]


def _read_results(file: Path | None, setting: dict[str, Any]) -> dict[str, Any]:
    """Reads the results in a file. Returns results without rows if the file does not exist.

    Raises a ``UserError`` if the file is not a results file, or if its settings are different.
    """
    setting = json.loads(json.dumps(setting))  # as in a file, where tuples are lists
    if file is None or not file.exists():
        return {"setting": setting, "skipped_images": 0, "losses": {}, "rows": []}
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        stored = dict(results["setting"])
        int(results["skipped_images"])
        for row in results["rows"]:
            _identify(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{file}' has no scores of probes: use another file") from error
    names = sorted({*stored, *setting})
    changed = [name for name in names if stored.get(name) != setting.get(name)]
    if changed:
        raise UserError(
            f"'{file}' has scores of another setting ({', '.join(changed)}): use another file, "
            "or remove it"
        )
    return {"losses": {}, **results}

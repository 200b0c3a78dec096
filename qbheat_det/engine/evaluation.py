# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluates models on the test sets of a config, and computes nearest-neighbour scores."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog, build_detection_test_loader
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset, print_csv_format
from detectron2.utils import comm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure
from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    DataError,
    ImageBatches,
    build_class_batches,
    build_image_batches,
    build_mapper,
    join_messages,
    load_labelled_sets,
    load_test_set,
)
from qbheat_det.evaluation import build_evaluator, extract_features, score_neighbours
from qbheat_det.modeling.contracts import FixedSizeModel, get_backbone

from .logs import track

logger = logging.getLogger(__name__)
TestLoader = DataLoader[Any] | ImageBatches
_MAX_IMAGES_DISTRIBUTED = 100_000  # with more, processes that wait for the main one may time out


def build_test_loader(cfg: CfgNode, dataset_name: str) -> TestLoader:
    """Returns a test loader whose mapper is ``INPUT.DATASET_MAPPER_NAME``.

    Detectors get Detectron2's loader with one image or tile per batch. Classifiers and pre-training
    objectives get batches of equally sized images.
    """
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
        return build_class_batches(cfg, dataset_name)
    if MetadataCatalog.get(dataset_name).get("evaluator_type") == "reconstruction":
        return build_image_batches(cfg, dataset_name)
    loader: TestLoader = build_detection_test_loader(
        load_test_set(cfg, dataset_name),
        mapper=build_mapper(cfg, is_train=False),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )
    return loader


class Evaluation:
    """Evaluates models on ``DATASETS.TEST``; reads annotations once."""

    def __init__(self, cfg: CfgNode, build_loader: Callable[[CfgNode, str], TestLoader]) -> None:
        """``build_loader`` returns a loader of this process's share of a data set."""
        self._cfg = cfg
        self._build_loader = build_loader
        self._parts: dict[str, tuple[TestLoader, DatasetEvaluator]] = {}
        self._warned: set[str] = set()

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        """Returns results by task, such as ``{"bbox": {"AP": …}}``, on the main process.

        With several test sets, returns such a dict for each, by name. Empty on other processes.
        """
        results = {name: self._evaluate(name, model) for name in self._cfg.DATASETS.TEST}
        if not comm.is_main_process():
            return {}
        return next(iter(results.values())) if len(results) == 1 else results

    def forget(self) -> None:
        """Makes the next evaluation rebuild its loaders and evaluators."""
        self._parts.clear()

    def _evaluate(self, name: str, model: nn.Module) -> dict[str, Any]:
        if name not in self._parts:
            classifies = self._cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES
            self._parts[name] = (
                self._build_loader(self._cfg, name),
                build_evaluator(self._cfg, name, classifies=classifies),
            )
        loader, evaluator = self._parts[name]
        images = track(loader, title=f"evaluating on {name}")
        results = dict(inference_on_dataset(model, images, evaluator) or {})
        if isinstance(loader, ImageBatches):
            skipped = [error for met in comm.all_gather(loader.skipped) for error in met.values()]
            if comm.is_main_process():
                _warn_of_skipped(f"evaluation on '{name}'", skipped, self._warned)
        if comm.is_main_process():
            print_csv_format(results)
            for task, metrics in results.items():
                # The terminal shows no per-class results; log.txt lists them.
                shown = [f"{key} {v:.4g}" if math.isfinite(v) else f"{key} \N{EN DASH}"
                         for key, v in metrics.items() if "-" not in key]  # fmt: skip
                logger.info(f"{task} on {name}: {', '.join(shown)}")
        return results


def _warn_of_skipped(task: str, errors: Sequence[DataError], warned: set[str]) -> None:
    """Logs the images that a task skips, at most once per task."""
    by_place = {error.where: error for error in errors}
    if by_place and task not in warned:
        warned.add(task)
        listed = [by_place[where] for where in sorted(by_place)]
        logger.warning(f"The {task} skips {len(listed):,} images: {join_messages(listed)}")


def scores_neighbours(cfg: CfgNode) -> bool:
    """Whether ``TEST.KNN`` names data sets for a nearest-neighbour score."""
    return bool(cfg.TEST.KNN.TRAIN or cfg.TEST.KNN.VAL)


def check_neighbours(cfg: CfgNode) -> None:
    """Checks the data sets of ``TEST.KNN``.

    Raises:
        UserError: a set is missing, the sets have different classes, or there are too many images
            for several processes.
    """
    keys = cfg.TEST.KNN
    if not (keys.TRAIN and keys.VAL):
        raise UserError("TEST.KNN.TRAIN and TEST.KNN.VAL must be given together")
    num_images = sum(map(len, load_labelled_sets(keys.TRAIN, keys.VAL)))
    if comm.get_world_size() > 1 and num_images > _MAX_IMAGES_DISTRIBUTED:
        raise UserError(
            f"TEST.KNN has {num_images:,} images, but only the main process scores them: use at "
            f"most {_MAX_IMAGES_DISTRIBUTED:,}, or qbheat probe"
        )


class NeighbourScorer:
    """Computes the nearest-neighbour score of a backbone's pooled features on ``TEST.KNN``."""

    def __init__(self, cfg: CfgNode, model: nn.Module) -> None:
        """
        Raises:
            UserError: the model accepts images of several sizes, as detectors do.
        """
        if not isinstance(model, FixedSizeModel):
            raise UserError(
                "TEST.KNN scores pre-training objectives and classifiers, not "
                f"'{cfg.MODEL.META_ARCHITECTURE}': use qbheat probe"
            )
        self._cfg = cfg
        self._batches: list[ImageBatches] = []  # training and validation set, once loaded
        self._warned: set[str] = set()

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Returns the scores of a model in eval mode; the calling process encodes all images."""
        keys = self._cfg.TEST.KNN
        if not self._batches:
            self._batches = [self._load(s) for s in load_labelled_sets(keys.TRAIN, keys.VAL)]
        assert isinstance(model, FixedSizeModel)
        backbone, name = get_backbone(model), model.in_feature
        assert backbone is not None

        def describe(batch: list[dict[str, Any]]) -> Tensor:
            return backbone(model.preprocess_image(batch))[name].mean(dim=(2, 3))

        train, val = (extract_features(describe, batches) for batches in self._batches)
        skipped = [error for batches in self._batches for error in batches.skipped.values()]
        _warn_of_skipped("nearest-neighbour score", skipped, self._warned)
        for key, (features, _) in {"TRAIN": train, "VAL": val}.items():
            if not len(features):
                raise UserError(f"no image of TEST.KNN.{key} can be read")
        return score_neighbours(train, val, k=keys.K, temperature=keys.TEMPERATURE)

    def draw(self, model: nn.Module) -> Figure:
        """Returns a ``Figure`` with the scores and no images, for the visualization hook."""
        score = self(model)
        logger.info(
            f"Nearest neighbours: top-1 {score['top1']:.2f} +- {score['top1_standard_error']:.2f} "
            f"%, top-5 {score['top5']:.2f} +- {score['top5_standard_error']:.2f}"
        )
        return Figure(
            "knn",
            "Nearest-neighbour classification",
            data=score,
            scalars={f"knn/{name}": value for name, value in score.items()},
        )

    def _load(self, records: list[dict[str, Any]]) -> ImageBatches:
        return ImageBatches(
            records,
            mapper=build_mapper(self._cfg, is_train=False),
            num_workers=self._cfg.DATALOADER.NUM_WORKERS,
            shared=False,
        )

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The nearest-neighbour score of a backbone, during pre-training and of weights alone."""

import logging
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure
from qbheat_det.data import ImageBatches, build_mapper, join_messages, load_labelled_sets
from qbheat_det.evaluation import extract_features, score_neighbours
from qbheat_det.modeling.contracts import FixedSizeModel, get_backbone

logger = logging.getLogger(__name__)
_MAX_IMAGES_DISTRIBUTED = 100_000  # else the other processes, which wait, may time out


def scores_neighbours(cfg: CfgNode) -> bool:
    """Whether a config names the sets of a nearest-neighbour score."""
    return bool(cfg.TEST.KNN.TRAIN or cfg.TEST.KNN.VAL)


def check_neighbours(cfg: CfgNode) -> None:
    """Checks ``TEST.KNN`` and lists its images.

    Raises:
        UserError: a value is out of range, or the sets have different classes.
    """
    keys = cfg.TEST.KNN
    if not (keys.TRAIN and keys.VAL):
        raise UserError("TEST.KNN.TRAIN and TEST.KNN.VAL must be given together")
    if keys.K < 1 or not keys.TEMPERATURE > 0:
        raise UserError("TEST.KNN.K and TEST.KNN.TEMPERATURE must be positive")
    num_images = sum(map(len, load_labelled_sets(keys.TRAIN, keys.VAL)))
    if comm.get_world_size() > 1 and num_images > _MAX_IMAGES_DISTRIBUTED:
        raise UserError(
            f"TEST.KNN names {num_images:,} images, but the main process scores them alone: name "
            f"at most {_MAX_IMAGES_DISTRIBUTED:,}, or use tools/probe_backbone.py"
        )


class NeighbourScorer:
    """Scores the mean of a backbone's map on the sets of ``TEST.KNN``."""

    def __init__(self, cfg: CfgNode, model: nn.Module) -> None:
        """
        Raises:
            UserError: models of this kind do not take images of one size.
        """
        if not isinstance(model, FixedSizeModel):
            raise UserError(
                "TEST.KNN scores pre-training objectives and classifiers, not "
                f"'{cfg.MODEL.META_ARCHITECTURE}': use tools/probe_backbone.py"
            )
        self._cfg = cfg
        self._batches: list[ImageBatches] = []  # of both sets, once loaded
        self._has_warned = False

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Returns the score of a model in eval mode; each process goes through all images."""
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
        if skipped and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"{len(skipped):,} images are left out of the nearest-neighbour score: "
                f"{join_messages(skipped)}"
            )
        for key, (features, _) in {"TRAIN": train, "VAL": val}.items():
            if not len(features):
                raise UserError(f"none of the images of TEST.KNN.{key} can be read")
        return score_neighbours(train, val, k=keys.K, temperature=keys.TEMPERATURE)

    def draw(self, model: nn.Module) -> Figure:
        """Returns the score as a figure without images, for the visualization hook."""
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
            memory_gb=self._cfg.INPUT.PRETRAIN.MEMORY_GB / 2,
        )

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A nearest-neighbour score of the backbone while it is pre-trained, and of weights alone."""

import logging
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.data import ImageBatches, build_mapper, load_labelled_sets
from qbheat_det.evaluation import KnnScore, extract_features, score_neighbours
from qbheat_det.modeling.contracts import FixedSizeModel, get_backbone

from .broken_images import name_faults
from .looking import Look

logger = logging.getLogger(__name__)
_MOST_BESIDE_OTHERS = 100_000  # images


def build_knn_looks(cfg: CfgNode, model: nn.Module) -> list[Look]:
    """Returns the look that ``TEST.KNN`` asks for, if it does.

    Raises:
        UserError: the model has no map to score.
    """
    if not names_neighbours(cfg):
        return []
    return [LookAtNeighbours(NeighbourScorer(cfg, model), cfg)]


def names_neighbours(cfg: CfgNode) -> bool:
    """Whether a config names the sets of a nearest-neighbour score."""
    return bool(cfg.TEST.KNN.TRAIN or cfg.TEST.KNN.VAL)


def check_neighbours(cfg: CfgNode) -> None:
    """Checks ``TEST.KNN`` and lists its images.

    Raises:
        UserError: a value makes no sense, or the sets are not of the same classes.
    """
    keys = cfg.TEST.KNN
    if not (keys.TRAIN and keys.VAL):
        raise UserError("TEST.KNN.TRAIN and TEST.KNN.VAL go together")
    if keys.K < 1 or not keys.TEMPERATURE > 0:
        raise UserError(
            f"TEST.KNN.K ({keys.K}) and TEST.KNN.TEMPERATURE ({keys.TEMPERATURE}) must be positive"
        )
    num_images = sum(map(len, load_labelled_sets(keys.TRAIN, keys.VAL)))
    if comm.get_world_size() > 1 and num_images > _MOST_BESIDE_OTHERS:
        raise UserError(
            f"TEST.KNN names {num_images:,} images, which the main process would go through alone "
            "while the others wait, and would stop waiting after a time: name sets of no more "
            f"than {_MOST_BESIDE_OTHERS:,}, or score checkpoints with tools/probe_backbone.py"
        )


class NeighbourScorer:
    """Scores a model's backbone on the sets of ``TEST.KNN``, by the mean of its map.

    Images are whole, as the mapper gives them in inference; those that fit in memory are decoded
    once.
    """

    def __init__(self, cfg: CfgNode, model: nn.Module) -> None:
        """
        Args:
            cfg: ``TEST.KNN``, and mapper and memory for images.
            model: of the kind to be scored.

        Raises:
            UserError: it has no map to score.
        """
        if get_backbone(model) is None or not isinstance(model, FixedSizeModel):
            raise UserError(
                f"TEST.KNN scores the backbone of models that are pre-trained, but "
                f"'{cfg.MODEL.META_ARCHITECTURE}' is none: tools/probe_backbone.py scores any "
                "backbone"
            )
        self._cfg = cfg
        self._batches: tuple[ImageBatches, ImageBatches] | None = None
        self._named = False

    def __call__(self, model: nn.Module) -> KnnScore:
        """Returns the score of a model in eval mode; each process works through all images."""
        if self._batches is None:
            first, second = load_labelled_sets(self._cfg.TEST.KNN.TRAIN, self._cfg.TEST.KNN.VAL)
            self._batches = self._load(first), self._load(second)

        backbone, scored = get_backbone(model), model
        assert backbone is not None
        assert isinstance(scored, FixedSizeModel)

        def describe(batch: list[dict[str, Any]]) -> Tensor:
            return backbone(scored.preprocess_image(batch))[scored.in_feature].mean(dim=(2, 3))

        train, val = (extract_features(describe, batches) for batches in self._batches)
        self._name_broken()
        for key, (features, _) in {"TRAIN": train, "VAL": val}.items():
            if not len(features):
                raise UserError(f"none of the images of TEST.KNN.{key} can be read")
        keys = self._cfg.TEST.KNN
        return score_neighbours(train, val, k=keys.K, temperature=keys.TEMPERATURE)

    def _load(self, records: list[dict[str, Any]]) -> ImageBatches:
        return ImageBatches(
            records,
            mapper=build_mapper(self._cfg, is_train=False),
            num_workers=self._cfg.DATALOADER.NUM_WORKERS,
            shared=False,
            memory_gb=self._cfg.INPUT.PRETRAIN.MEMORY_GB / 2,
        )

    def _name_broken(self) -> None:
        faults = [fault for batches in self._batches or () for fault in batches.faults.values()]
        if faults and not self._named:
            logger.warning(
                f"Left out of the nearest-neighbour score, {len(faults):,} in all: "
                f"{name_faults(faults)}"
            )
        self._named = True


class LookAtNeighbours(Look):
    """Scores the backbone by nearest neighbours, as "knn/top1" and so on, and ``knn_<steps>.json``.

    "top1" and "top5" are in per cent of the images of ``TEST.KNN.VAL``, each with its standard
    error.
    """

    def __init__(self, scorer: NeighbourScorer, cfg: CfgNode) -> None:
        """
        Args:
            scorer: of the run's model.
            cfg: ``VIS.PERIOD`` and ``VIS.SHARE``.
        """
        super().__init__(period=cfg.VIS.PERIOD, share=cfg.VIS.SHARE)
        self._scorer = scorer

    def look(self) -> None:
        """Scores, writes and tells it."""
        score = self._scorer(self.trainer.evaluated_model)
        values = score.to_dict()
        self.record({f"knn/{name}": value for name, value in values.items()})
        self.write_json("knn", {**values, "num_images": score.num_images})
        logger.info(
            f"Nearest neighbours after {self.steps:,} steps: top-1 {score.top1:.2f} +- "
            f"{score.top1_standard_error:.2f} %, top-5 {score.top5:.2f} +- "
            f"{score.top5_standard_error:.2f} % of {score.num_images:,} images"
        )

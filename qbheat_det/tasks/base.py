# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a model is trained for, and everything that a run needs to know about it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from detectron2.config import CfgNode
from detectron2.evaluation import DatasetEvaluator

from qbheat_det.data import ImageBatches, Mapper, Source, build_mapper

Records = list[dict[str, Any]]


class Task(ABC):
    """A kind of training: its data, mappers, loaders, evaluator and default recipe.

    A subclass in a file of its own, and a row in ``TASKS``, add a task.
    """

    name: ClassVar[str]
    """Name for users, such as "detection"."""
    learns_from: ClassVar[str]
    """What the training data have, such as "boxes"."""
    recipe: ClassVar[str]
    """Shipped config for commands that name none."""
    mappers: ClassVar[set[str]]
    """Values of ``INPUT.DATASET_MAPPER_NAME``. Add the name of a mapper of your own."""
    set_names: ClassVar[tuple[str, str]]
    """Names of the training and the validation set that flags give."""
    data_flags: ClassVar[str]
    """Advice how to name data on the command line."""
    size_keys: ClassVar[tuple[str, ...]]
    """Config keys that ``--image-size`` sets."""
    batch_size: ClassVar[int]
    """Images per batch and process in evaluation."""

    @abstractmethod
    def fits(self, source: Source) -> bool:
        """Returns whether a model of this task can learn from a source."""

    @abstractmethod
    def load_training_set(self, cfg: CfgNode) -> Sequence[dict[str, Any]]:
        """Returns the records of ``DATASETS.TRAIN``."""

    @abstractmethod
    def load_test_set(self, cfg: CfgNode, dataset_name: str) -> Records:
        """Returns the records of a test set, as the model is evaluated on them."""

    @abstractmethod
    def build_evaluator(self, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        """Returns the evaluator of a registered set. Raises a ``UserError`` if there is none."""

    @abstractmethod
    def get_image_size(self, cfg: CfgNode) -> int:
        """Returns the size of training images in pixels, which ``--image-size`` sets."""

    @abstractmethod
    def get_size_values(
        self, cfg: CfgNode, image_size: int, *, eval_only: bool = False
    ) -> dict[str, Any]:
        """Returns the values of ``size_keys`` for an image size in pixels, by config key."""

    def get_class_values(self, names: Sequence[str], ids: Sequence[int]) -> dict[str, Any]:
        """Returns the config values for classes with these names and annotated ids, by key."""
        return {}

    def build_test_loader(
        self, cfg: CfgNode, dataset_name: str, *, mapper: Mapper | None = None
    ) -> ImageBatches:
        """Returns a loader of this process's share of a test set.

        Args:
            cfg: config of the model.
            dataset_name: name of a registered set.
            mapper: maps a record to a dict of a batch; by default the mapper that
                ``INPUT.DATASET_MAPPER_NAME`` names, in evaluation.
        """
        return ImageBatches(
            self.load_test_set(cfg, dataset_name),
            mapper=mapper or build_mapper(cfg, is_train=False),
            batch_size=self.batch_size,
            num_workers=cfg.DATALOADER.NUM_WORKERS,
        )


def list_common_class_values(names: Sequence[str], ids: Sequence[int]) -> Mapping[str, Any]:
    """Returns the config values of every task with classes."""
    return {"MODEL.CLASS_NAMES": list(names), "MODEL.CATEGORY_IDS": list(ids)}

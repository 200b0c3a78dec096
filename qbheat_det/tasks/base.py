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
    """What a model is trained for: its data, mappers, loaders, evaluator and default recipe.

    To add a task, write a subclass and add an instance to ``TASKS``.
    """

    name: ClassVar[str]
    """Name for users, such as "detection"."""
    learns_from: ClassVar[str]
    """What the training data have, such as "boxes"."""
    uses_boxes: ClassVar[bool] = False
    """Whether the model learns from boxes."""
    uses_class_folders: ClassVar[bool] = False
    """Whether the model learns from the names of folders."""
    recipe: ClassVar[str]
    """Shipped config for commands that name none."""
    sizes: ClassVar[Mapping[str, str]] = {}
    """Shipped configs for GPUs by ``--size``; the first one is used on a GPU by default."""
    mappers: ClassVar[set[str]]
    """Values of ``INPUT.DATASET_MAPPER_NAME``. You can add the name of your own mapper."""
    set_names: ClassVar[tuple[str, str]]
    """Names under which the training and validation data of flags are registered."""
    data_flags: ClassVar[str]
    """Advice for error messages: the flags that name the data."""
    size_keys: ClassVar[tuple[str, ...]]
    """Config keys that ``--image-size`` sets."""
    batch_size: ClassVar[int]
    """Images per batch and process in evaluation."""

    @property
    def uses_labels(self) -> bool:
        """Whether the model learns from boxes or class folders, and not from images alone."""
        return self.uses_boxes or self.uses_class_folders

    @abstractmethod
    def fits(self, source: Source) -> bool:
        """Returns whether a model of this task can learn from a source."""

    @abstractmethod
    def load_training_set(self, cfg: CfgNode) -> Sequence[dict[str, Any]]:
        """Returns the records of ``DATASETS.TRAIN``."""

    @abstractmethod
    def load_test_set(self, cfg: CfgNode, dataset_name: str) -> Records:
        """Returns the records on which a model is evaluated, in the order of evaluation."""

    @abstractmethod
    def build_evaluator(self, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        """Returns the evaluator of a registered set.

        Raises a ``UserError`` if the set cannot be evaluated.
        """

    @abstractmethod
    def get_image_size(self, cfg: CfgNode) -> int:
        """Returns the size of training images in pixels, which ``--image-size`` sets."""

    @abstractmethod
    def get_size_values(
        self, cfg: CfgNode, image_size: int, *, eval_only: bool = False
    ) -> dict[str, Any]:
        """Returns the values of ``size_keys`` for an image size in pixels, by config key.

        With ``eval_only``, the size is that of test images, where the config distinguishes them.
        """

    def get_class_values(self, names: Sequence[str], ids: Sequence[int]) -> dict[str, Any]:
        """Returns the config values for classes, by key; empty for tasks without classes.

        ``names`` are the names of the classes. ``ids`` are their ids in the annotation file.
        """
        return {}

    def build_test_loader(
        self, cfg: CfgNode, dataset_name: str, *, mapper: Mapper | None = None
    ) -> ImageBatches:
        """Returns a loader of this process's share of a test set.

        Args:
            cfg: config of the model.
            dataset_name: name of a registered set.
            mapper: maps a record to an input of the model. None uses the mapper that
                ``INPUT.DATASET_MAPPER_NAME`` names, without augmentation.
        """
        return ImageBatches(
            self.load_test_set(cfg, dataset_name),
            mapper=mapper or build_mapper(cfg, is_train=False),
            batch_size=self.batch_size,
            num_workers=cfg.DATALOADER.NUM_WORKERS,
        )


def list_common_class_values(names: Sequence[str], ids: Sequence[int]) -> Mapping[str, Any]:
    """Returns the config values that all tasks with classes have in common, by key."""
    return {"MODEL.CLASS_NAMES": list(names), "MODEL.CATEGORY_IDS": list(ids)}

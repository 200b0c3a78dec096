# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Batches of whole images for evaluation, each image in one or several views.

The view of an image is its "place": the quarter that stays visible.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetFromList, MapDataset
from detectron2.data.build import trivial_batch_collator
from detectron2.data.samplers import InferenceSampler
from torch import is_tensor
from torch.utils.data import DataLoader

from qbheat_det.data.checks import DataError
from qbheat_det.modeling.contracts import get_views

from .datasets.image_folder import load_classes
from .mappers import Mapper, build_mapper, number_records

BATCH_SIZE = 64
"""Images per batch and process."""


class ImageBatches(Iterable[list[dict[str, Any]]]):
    """Iterates over the images of a set in batches and in order, any number of times.

    ``skipped`` has the errors of unreadable images, by image. Entries are copied out of the
    workers' shared memory, so callers may keep any number of them.
    """

    def __init__(
        self,
        records: Sequence[dict[str, Any]],
        *,
        mapper: Mapper,
        batch_size: int = BATCH_SIZE,
        num_workers: int = 0,
        shared: bool = True,
        memory_gb: float = 0.0,
    ) -> None:
        """
        Args:
            records: dicts for the mapper.
            mapper: returns a ``DataError`` for an image that cannot be read.
            batch_size: images per batch; the last one may be smaller.
            num_workers: loading processes; without ``memory_gb`` they persist between passes.
            shared: split the images among the processes of a run; else each process takes all.
            memory_gb: if all decoded images take less than this, decode them only once.
        """
        self._loader: DataLoader[Any] = DataLoader(
            MapDataset(DatasetFromList(list(records), copy=False), mapper),
            batch_size=batch_size,
            sampler=InferenceSampler(len(records)) if records and shared else None,
            num_workers=num_workers,
            collate_fn=trivial_batch_collator,
            persistent_workers=num_workers > 0 and not memory_gb,
            generator=torch.Generator(),  # else it draws from the global one
        )
        self._budget = 1e9 * memory_gb
        self._kept: list[list[dict[str, Any]]] | None = None
        self.skipped: dict[str, DataError] = {}

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[list[dict[str, Any]]] | None = [] if self._budget > 0 else None
        for batch in self._loader:
            self.skipped.update({e.where: e for e in batch if isinstance(e, DataError)})
            if whole := [_own(entry) for entry in batch if not isinstance(entry, DataError)]:
                if kept is not None and _bytes(whole) * len(self) <= self._budget:
                    kept.append(whole)
                else:
                    kept = None
                yield whole
        self._kept = kept


def build_image_batches(
    cfg: CfgNode, dataset_name: str, *, mapper: Mapper | None = None
) -> ImageBatches:
    """Builds the batches of a registered set, with each image once per view of the model."""
    records = number_records(DatasetCatalog.get(dataset_name))
    return _build(cfg, with_views(records, get_views(cfg).values()), mapper)


def build_class_batches(cfg: CfgNode, dataset_name: str) -> ImageBatches:
    """Builds the batches of a registered set, with labels that index ``MODEL.CLASS_NAMES``."""
    return _build(cfg, load_classes([dataset_name], cfg.MODEL.CLASS_NAMES))


def with_views(
    records: Sequence[dict[str, Any]], views: Iterable[Sequence[str]]
) -> list[dict[str, Any]]:
    """Returns each record once per view, with "place"; the views of an image are adjacent.

    Images cycle through the places of a view. A view without places adds no "place".
    """
    kinds = list(views)
    return [
        {**record, "place": places[i % len(places)]} if places else record
        for i, record in enumerate(records)
        for places in kinds
    ]


def _build(
    cfg: CfgNode, records: Sequence[dict[str, Any]], mapper: Mapper | None = None
) -> ImageBatches:
    mapper = mapper or build_mapper(cfg, is_train=False)
    return ImageBatches(records, mapper=mapper, num_workers=cfg.DATALOADER.NUM_WORKERS)


def _bytes(batch: list[dict[str, Any]]) -> int:
    return sum(value.nbytes for entry in batch for value in entry.values() if is_tensor(value))


def _own(entry: dict[str, Any]) -> dict[str, Any]:
    # A shared tensor is an open file; a process may have about a thousand.
    return {
        key: value.clone() if is_tensor(value) and value.is_shared() else value
        for key, value in entry.items()
    }

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Batches of images for evaluation, with one view or several views per image.

A view shows one quarter of the image. The key "place" of a record names this quarter.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from detectron2.data import DatasetFromList, MapDataset
from detectron2.data.samplers import InferenceSampler
from torch import is_tensor
from torch.utils.data import DataLoader

from qbheat_det.data.checks import DataError, count_files

from .mappers import Mapper
from .workers import find_timeout, receive_batches, share_batch

BATCH_SIZE = 64
"""Images per batch and process."""


class ImageBatches(Iterable[list[dict[str, Any]]]):
    """Iterates over the images of a data set in batches and in order, any number of times.

    Callers may keep any number of batches, because these do not use the shared memory of worker
    processes. A batch has fewer images if some of its images cannot be read.

    Attributes:
        skipped: maps each image that this process could not read to its error.
        num_files: number of images of all processes.
    """

    def __init__(
        self,
        records: Sequence[dict[str, Any]],
        *,
        mapper: Mapper,
        batch_size: int = BATCH_SIZE,
        num_workers: int = 0,
        shared: bool = True,
    ) -> None:
        """
        Args:
            records: inputs of the mapper.
            mapper: maps a record to a dict of a batch, or to a ``DataError`` if the image cannot be
                read.
            batch_size: number of images per batch. The last batch may be smaller.
            num_workers: number of worker processes.
            shared: split the images among the processes of a distributed run. If False, each
                process iterates over all images.
        """
        sampler = None
        if records and shared:
            sampler = InferenceSampler(len(records))
        self._loader: DataLoader[Any] = DataLoader(
            MapDataset(DatasetFromList(list(records), copy=False), mapper),
            batch_size=batch_size,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=share_batch,
            timeout=find_timeout(num_workers),
            generator=torch.Generator(),  # the default draws from the global generator
        )
        self.skipped: dict[str, DataError] = {}
        self.num_files = count_files(records)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for batch in receive_batches(self._loader):
            inputs = []
            for mapped in batch:
                if isinstance(mapped, DataError):
                    self.skipped[mapped.where] = mapped
                else:
                    inputs.append(_copy_shared_tensors(mapped))
            if inputs:
                yield inputs


def with_views(
    records: Sequence[dict[str, Any]], views: Iterable[Sequence[str]]
) -> list[dict[str, Any]]:
    """Returns each record once per view. The key "place" names the quarter that the view shows.

    Args:
        records: records of the images.
        views: for each view, the names of the quarters that the images use in turn: image i uses
            the name i modulo their number. An empty list is a view of the whole image, without the
            key "place".

    Returns:
        The records of all views. Those of one image are adjacent.
    """
    quarters_of_views = list(views)
    repeated = []
    for index, record in enumerate(records):
        for quarters in quarters_of_views:
            if quarters:
                repeated.append({**record, "place": quarters[index % len(quarters)]})
            else:
                repeated.append(record)
    return repeated


def _copy_shared_tensors(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns a dict whose tensors are not in the shared memory of the worker processes."""
    copied = dict(entry)
    for key, value in entry.items():
        # A shared tensor is an open file, and a process can open only about a thousand files.
        if is_tensor(value) and value.is_shared():
            copied[key] = value.clone()
    return copied

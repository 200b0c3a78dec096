# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Image sets in evaluation: whole images in batches, and held-out images from two views each.

Which view an image is seen from is its "place", that of the quarter which stays visible.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetFromList, MapDataset
from detectron2.data.build import trivial_batch_collator
from detectron2.data.samplers import InferenceSampler
from torch import is_tensor
from torch.utils.data import DataLoader

from .faults import Fault
from .mappers import Mapper, build_mapper

BATCH_SIZE = 64
"""Images that a process evaluates at once."""

# In evaluation nothing is drawn: the images of a set take these in turn.
_CORNERS = ("top_left", "top_right", "bottom_left", "bottom_right")
_PLACES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "corner": (_CORNERS,),
    "centre": (("centre",),),
    "both": (_CORNERS, ("centre",)),
}


class ImageBatches(Iterable[list[dict[str, Any]]]):
    """Images of a set in batches and in order, as often as wanted.

    Images that cannot be read are left out, and never end a run. Entries can be kept, any number of
    them: what workers send is copied out of the memory that they share.

    Attributes:
        faults: what is wrong with the images of this process that were left out, by image.
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
            mapper: gives a ``Fault`` for an image that cannot be read.
            batch_size: the most images of a batch.
            num_workers: processes that load ahead; without memory they wait for the next pass.
            shared: whether each process of a run takes its part; else each takes all.
            memory_gb: images that take less than this when decoded, in GB, are decoded once.
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
        self._kept: list[list[dict[str, Any]]] = []
        self._all_kept = False
        self.faults: dict[str, Fault] = {}

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        if self._all_kept:
            yield from self._kept
            return
        keeping = self._budget > 0
        kept: list[list[dict[str, Any]]] = []
        for batch in self._loader:
            broken = [entry for entry in batch if isinstance(entry, Fault)]
            self.faults.update({fault.where: fault for fault in broken})
            if whole := [_own(entry) for entry in batch if not isinstance(entry, Fault)]:
                keeping = keeping and _bytes(whole) * len(self) <= self._budget
                if keeping:
                    kept.append(whole)
                else:
                    kept.clear()
                yield whole
        self._kept, self._all_kept = kept, keeping


def build_image_batches(cfg: CfgNode, dataset_name: str) -> ImageBatches:
    """Builds the batches of a registered set, from all views that the objective trains on.

    With ``MODEL.QB_HEAT.VISIBLE`` "both", every image comes twice: with a corner visible, the
    four in turn over the images, and with the centre visible. Other models than QB-Heat, which have
    no places, get every image once.
    """
    records = DatasetCatalog.get(dataset_name)
    if cfg.MODEL.META_ARCHITECTURE == "QBHeat":
        records = with_places(records, cfg.MODEL.QB_HEAT.VISIBLE)
    return ImageBatches(
        records,
        mapper=build_mapper(cfg, is_train=False),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )


def with_places(records: Sequence[dict[str, Any]], visible: str) -> list[dict[str, Any]]:
    """Returns each record once for each view, with "place", the views of an image side by side.

    Args:
        records: of a data set.
        visible: "corner", "centre" or "both".
    """
    views = _PLACES[visible]
    return [
        {**record, "place": places[i % len(places)]}
        for i, record in enumerate(records)
        for places in views
    ]


def _bytes(batch: list[dict[str, Any]]) -> int:
    return sum(value.nbytes for entry in batch for value in entry.values() if is_tensor(value))


def _own(entry: dict[str, Any]) -> dict[str, Any]:
    # A shared tensor is an open file, of which a process may have about a thousand.
    return {
        key: value.clone() if is_tensor(value) and value.is_shared() else value
        for key, value in entry.items()
    }

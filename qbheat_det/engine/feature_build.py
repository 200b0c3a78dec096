# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Encodes the views of a set of images and fills a store with them, in one or many processes.

Views of one size are encoded together, as many at once as a step of training has: how matrix
products are rounded depends on the number of images, but not on which these are.
"""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import torch
from detectron2.data import DatasetFromList
from detectron2.data.build import trivial_batch_collator
from detectron2.structures import Boxes, Instances
from detectron2.utils import comm
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import remove_leftovers
from qbheat_det.data import DataError, FixedViews, cut
from qbheat_det.data.feature_store import FeatureStore, Stored, View, check_space
from qbheat_det.modeling.backbone import CachedBackbone

Mapped = dict[str, Any] | DataError | None

_SECONDS_BETWEEN_CHECKS = 0.5  # of what other processes have written
_SECONDS_BETWEEN_LINES = 30  # of progress in a log
_BOX_FIELDS = {"gt_boxes", "gt_classes"}
_NOT_KEPT = {"sem_seg", "proposals"}
_FULL_SIZE = {"height", "width"}


@dataclass(frozen=True)
class ViewEncoder:
    """Turns entries of a mapper into views of a store, through a model's own encoder.

    Attributes:
        model: a meta-architecture.
        backbone: that is a part of it; ``encoding`` holds while views are encoded.
        at_once: images of a batch, at most.
        is_train: the mode of the model. Attention is computed otherwise in evaluation, and
            rounded otherwise.
        is_exact: whether the last bits matter: if all views are of one size, a batch that is too
            small is then filled up by repetition. Else batches are cut evenly.
    """

    model: nn.Module
    backbone: CachedBackbone
    at_once: int
    is_train: bool
    is_exact: bool

    def __call__(self, entries: Sequence[Mapped]) -> list[Stored]:
        """Returns a view for each entry; an error, or None, stays what it is.

        Raises:
            UserError: an entry holds what a store does not keep.
        """
        views: list[Stored] = [None if isinstance(entry, dict) else entry for entry in entries]
        images = {i: entry for i, entry in enumerate(entries) if isinstance(entry, dict)}
        of_size: dict[tuple[int, ...], list[int]] = {}
        for index, entry in images.items():
            check_keepable(entry)
            of_size.setdefault(tuple(entry["image"].shape), []).append(index)
        was_training = self.model.training
        self.model.train(self.is_train)
        try:
            for indices in of_size.values():
                is_filled = self.is_exact and len(of_size) == 1
                for part in cut(indices, -(-len(indices) // self.at_once)):
                    filled = self.at_once if is_filled else len(part)
                    batch = [images[i] for i in islice(cycle(part), filled)]
                    outputs = self.backbone.encode(self.model, batch)
                    outputs = {name: v.float().cpu().contiguous() for name, v in outputs.items()}
                    for position, index in enumerate(part):
                        features = {name: value[position] for name, value in outputs.items()}
                        views[index] = make_view(images[index], features)
        finally:
            self.model.train(was_training)
        return views


def check_keepable(entry: Mapping[str, Any]) -> None:
    """Raises a ``UserError`` if a mapper's entry holds more than boxes, classes and a label."""
    instances = entry.get("instances")
    fields = instances.get_fields() if isinstance(instances, Instances) else {}
    others = [*(entry.keys() & _NOT_KEPT), *sorted(fields.keys() - _BOX_FIELDS)]
    if not isinstance(fields.get("gt_boxes"), Boxes | None):
        others.append(type(fields["gt_boxes"]).__name__)
    if others:
        raise UserError(
            f"image '{entry.get('file_name', '')}' comes with '{others[0]}', which the cache does "
            "not keep: set MODEL.CACHE_FEATURES.ENABLED False"
        )


def make_view(entry: Mapping[str, Any], features: Mapping[str, Tensor]) -> View:
    """Returns a view of a mapper's entry from the encoder's outputs for its "image" (3, H, W)."""
    height, width = entry["image"].shape[-2:]
    truth: dict[str, Tensor] = {}
    if "instances" in entry:
        truth["gt_boxes"] = entry["instances"].gt_boxes.tensor.float()
        truth["gt_classes"] = entry["instances"].gt_classes.long()
    if "label" in entry:
        truth["label"] = torch.tensor(int(entry["label"]))
    full = (int(entry["height"]), int(entry["width"])) if entry.keys() >= _FULL_SIZE else None
    return View(dict(features), (int(height), int(width)), truth, full)


class AllViews(Dataset[Mapped]):
    """The K views of each numbered record; those of row r have the indices r * K to r * K + K - 1.

    Attributes:
        records: of the set.
        count: K.
    """

    def __init__(self, records: Sequence[dict[str, Any]], views: FixedViews) -> None:
        # One array of bytes, which forked workers share instead of copying.
        self.records = (
            records
            if isinstance(records, DatasetFromList)
            else DatasetFromList(list(records), copy=False, serialize=True)
        )
        self.count = views.count
        self._draw = views.view

    def __len__(self) -> int:
        return len(self.records) * self.count

    def __getitem__(self, index: int) -> Mapped:
        row, number = divmod(index, self.count)
        return self._draw(self.records[row], number)

    def load(self, indices: Iterable[int], num_workers: int) -> Iterator[Mapped]:
        """Yields views in the order of the indices, loaded ahead if there are workers."""
        loader: DataLoader[Any] = DataLoader(
            self,
            batch_size=None,
            sampler=indices,
            num_workers=num_workers,
            collate_fn=trivial_batch_collator,
            generator=torch.Generator(),  # else it draws from the global one
        )
        yield from loader


@dataclass
class CachedSet:
    """A set of images, and where the features of its views are.

    Attributes:
        title: for the log.
    """

    title: str
    views: AllViews
    store: FeatureStore
    encoder: ViewEncoder


def fill(cached: CachedSet, *, num_workers: int) -> None:
    """Writes what is missing of a set, and shares the work with other processes that do so.

    Returns when nothing is missing, whoever wrote it; ``num_workers`` processes load views ahead.

    Raises:
        UserError: the store cannot be written, or cannot hold what there is.
    """
    store = cached.store
    remove_leftovers(store.folder)
    is_space_checked = False
    with tqdm(
        total=store.num_views,
        desc=cached.title,
        unit=" views",
        mininterval=0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES,
        disable=not comm.is_main_process(),
    ) as bar:
        while missing := store.missing():
            left = sum(len(store.views_of(chunk)) for chunk in missing)
            bar.update(store.num_views - left - bar.n)
            with contextlib.closing(_Claims(store, missing)) as claims:
                first = list(islice(claims, 1))
                if not first:  # others are at work on all of them
                    time.sleep(_SECONDS_BETWEEN_CHECKS)
                    continue
                loaded = cached.views.load(chain(first, claims), num_workers)
                while (chunk := claims.next_chunk(loaded)) is not None:
                    number, entries = chunk
                    store.write(number, cached.encoder(entries))
                    claims.release(number)
                    if not is_space_checked:  # the first file shows what all of them take
                        is_space_checked = True
                        size = store.path_of(number).stat().st_size
                        check_space(store.folder, size * (len(missing) - 1))
                    bar.update(len(entries))
        bar.update(store.num_views - bar.n)


class _Claims(Iterator[int]):
    """Claims chunks as their views are asked for, and gives the views' numbers to a loader."""

    def __init__(self, store: FeatureStore, chunks: Sequence[int]) -> None:
        self._store = store
        self._chunks = iter(chunks)
        self._held: dict[int, contextlib.ExitStack] = {}  # in the order of the views
        self._indices: Iterator[int] = iter(())

    def __next__(self) -> int:
        for index in self._indices:
            return index
        for chunk in self._chunks:
            stack = contextlib.ExitStack()
            if not stack.enter_context(self._store.claim(chunk)):
                stack.close()
                continue
            self._held[chunk] = stack
            self._indices = iter(self._store.views_of(chunk))
            return next(self._indices)
        raise StopIteration

    def next_chunk(self, loaded: Iterator[Mapped]) -> tuple[int, list[Mapped]] | None:
        """Returns the next chunk that is held, with its views; None if there are no more."""
        for first in loaded:
            chunk = next(iter(self._held))
            return chunk, [first, *(next(loaded) for _ in self._store.views_of(chunk)[1:])]
        return None

    def release(self, chunk: int) -> None:
        """Gives back the claim on a chunk."""
        self._held.pop(chunk).close()

    def close(self) -> None:
        """Gives back all claims."""
        for stack in self._held.values():
            stack.close()

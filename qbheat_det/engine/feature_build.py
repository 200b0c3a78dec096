# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Encodes the views of a set of images and fills a store with them, beside others who do the same.

Views of one size are encoded together, as many at once as a step of training has: how matrix
products are rounded depends on the number of images, while an image's place in the batch and what
the others show do not matter. (On CPUs batches of 1, 2, a few and 16 or more were seen to differ.)
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
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
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import remove_leftovers
from qbheat_det.data import Fault, FeatureStore, FixedViews, Stored, cut, make_view
from qbheat_det.modeling.backbone import CachedBackbone

from .dry_run_report import format_duration

logger = logging.getLogger(__name__)
Mapped = dict[str, Any] | Fault | None

_SECONDS_BETWEEN_COUNTS = 30  # of files, and so lines of the log where no terminal shows a bar
_SECONDS_BETWEEN_LOOKS = 0.5  # for what other processes have written
_BOX_FIELDS = {"gt_boxes", "gt_classes"}
_NOT_KEPT = {"sem_seg", "proposals"}


class ViewEncoder:
    """Turns entries of a mapper into views of a store, through a model's own encoder."""

    def __init__(
        self,
        model: nn.Module,
        backbone: CachedBackbone,
        *,
        at_once: int,
        is_train: bool,
        is_exact: bool,
    ) -> None:
        """
        Args:
            model: a meta-architecture.
            backbone: that stands in it; ``encoding`` holds while views are encoded.
            at_once: images of a batch, at most.
            is_train: the mode of the model. Attention is computed otherwise in evaluation, and
                rounded otherwise.
            is_exact: whether the last bits are wanted: where all views are of one size, a batch
                that is too small is then filled up by repetition. Else batches are cut evenly.
        """
        self._model = model
        self._backbone = backbone
        self.at_once = at_once
        self._is_train = is_train
        self._is_exact = is_exact

    def __call__(self, entries: Sequence[Mapped]) -> list[Stored]:
        """Returns a view for each entry; a fault, or None, stays what it is.

        Raises:
            UserError: an entry holds what a store does not keep.
        """
        was_training = self._model.training
        self._model.train(self._is_train)
        try:
            return self._encode_by_size(entries)
        finally:
            self._model.train(was_training)

    def _encode_by_size(self, entries: Sequence[Mapped]) -> list[Stored]:
        views: list[Stored] = [None if isinstance(entry, dict) else entry for entry in entries]
        of_size: dict[tuple[int, ...], list[int]] = {}
        for index, entry in enumerate(entries):
            if isinstance(entry, dict):
                of_size.setdefault(tuple(entry["image"].shape), []).append(index)
        for indices in of_size.values():
            is_filled = self._is_exact and len(of_size) == 1
            for part in cut(indices, -(-len(indices) // self.at_once)):
                filled = self.at_once if is_filled else len(part)
                batch = [check_keepable(entries[i]) for i in islice(cycle(part), filled)]
                for index, features in zip(part, self._encode(batch), strict=False):
                    views[index] = make_view(check_keepable(entries[index]), features)
        return views

    def _encode(self, batch: Sequence[dict[str, Any]]) -> list[dict[str, Tensor]]:
        outputs = self._backbone.encode(self._model, batch)
        here = {name: value.float().cpu().contiguous() for name, value in outputs.items()}
        return [{name: value[i] for name, value in here.items()} for i in range(len(batch))]


def check_keepable(entry: Mapped) -> dict[str, Any]:
    """Returns the entry itself.

    Raises:
        UserError: it holds more than boxes, classes and a label, such as masks.
    """
    assert isinstance(entry, dict)
    instances = entry.get("instances")
    fields = instances.get_fields() if isinstance(instances, Instances) else {}
    others = [*(entry.keys() & _NOT_KEPT), *sorted(fields.keys() - _BOX_FIELDS)]
    if "gt_boxes" in fields and not isinstance(fields["gt_boxes"], Boxes):
        others.append(type(fields["gt_boxes"]).__name__)
    if others:
        raise UserError(
            f"image '{entry.get('file_name', '')}' comes with '{others[0]}', but "
            "MODEL.CACHE_FEATURES keeps boxes, classes and labels alone: set "
            "MODEL.CACHE_FEATURES.ENABLED False"
        )
    return entry


class ViewsOf(Dataset[Mapped]):
    """All views of a set by number: that of a record's first view is the record's row times K.

    Attributes:
        records: of the set.
        count: K.
    """

    def __init__(self, records: Sequence[dict[str, Any]], views: FixedViews) -> None:
        """
        Args:
            records: numbered, see ``qbheat_det.data.number_records``.
            views: draws them.
        """
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
        """Yields views in the order asked for, loaded ahead where there are workers."""
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
        title: what is done to it, for the log.
        views: of the images.
        store: of as many views.
        encoder: of the views.
    """

    title: str
    views: ViewsOf
    store: FeatureStore
    encoder: ViewEncoder


def fill(cached: CachedSet, *, num_workers: int) -> None:
    """Writes what is missing of a set; other processes that do so too share the work.

    Returns when nothing is missing, whoever wrote it.

    Args:
        cached: set of images.
        num_workers: processes that load ahead.

    Raises:
        UserError: the store cannot be written, or cannot hold what there is.
    """
    store = cached.store
    remove_leftovers(store.folder)
    with _Progress(store, cached.title) as progress:
        while missing := store.missing():
            with contextlib.closing(_Claims(store, missing)) as claims:
                first = list(islice(claims, 1))
                if not first:  # others are at work on all of them
                    time.sleep(_SECONDS_BETWEEN_LOOKS)
                    progress.tell()
                    continue
                loaded = cached.views.load(chain(first, claims), num_workers)
                while (chunk := claims.next_chunk(loaded)) is not None:
                    number, entries = chunk
                    store.write(number, cached.encoder(entries))
                    claims.release(number)
                    progress.tell(len(entries))


class _Claims(Iterator[int]):
    """Claims chunks as their views are asked for, and gives their numbers to a loader."""

    def __init__(self, store: FeatureStore, chunks: Sequence[int]) -> None:
        self._store = store
        self._chunks = iter(chunks)
        self._held: dict[int, contextlib.ExitStack] = {}
        self._waiting: list[int] = []
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
            self._waiting.append(chunk)
            self._indices = iter(self._store.views_of(chunk))
            return next(self._indices)
        raise StopIteration

    def next_chunk(self, loaded: Iterator[Mapped]) -> tuple[int, list[Mapped]] | None:
        """Returns the next chunk that is held, with its views; None where there are no more."""
        for first in loaded:
            chunk = self._waiting.pop(0)
            return chunk, [first, *(next(loaded) for _ in self._store.views_of(chunk)[1:])]
        return None

    def release(self, chunk: int) -> None:
        """Gives back the claim on a chunk."""
        self._held.pop(chunk).close()

    def close(self) -> None:
        """Gives back all claims."""
        for stack in self._held.values():
            stack.close()


class _Progress:
    """A bar where a terminal shows one, else lines of the log; on the main process."""

    def __init__(self, store: FeatureStore, title: str) -> None:
        self._store = store
        self._title = title
        self._total = store.num_views
        self._before = self._left = self._count_missing()
        self._started = self._counted = time.perf_counter()
        self._is_main = comm.is_main_process()
        self._bar = tqdm(
            total=self._total,
            initial=self._total - self._left,
            desc=title,
            unit=" views",
            disable=not (self._is_main and sys.stderr.isatty()),
        )

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def tell(self, written: int = 0) -> None:
        """Shows what is done, and the time left.

        What other processes have written is looked for now and then: it takes a look at each file.

        Args:
            written: views that this process wrote since the last call.
        """
        if not self._is_main:
            return
        self._left -= written
        now = time.perf_counter()
        if is_due := now - self._counted >= _SECONDS_BETWEEN_COUNTS:
            self._counted, self._left = now, self._count_missing()
        self._bar.update(self._total - self._left - self._bar.n)
        if self._bar.disable and is_due:
            done = max(1, self._before - self._left)
            left = (now - self._started) * self._left / done
            logger.info(
                f"{self._title}: {self._total - self._left:,} of {self._total:,} views, "
                f"{format_duration(left)} left"
            )

    def _count_missing(self) -> int:
        return sum(len(self._store.views_of(chunk)) for chunk in self._store.missing())

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The infinite iterator over training batches, which can start at any step.

The images of a step and their augmentation depend only on the seed, and not on the number of
processes or workers. To this end, each process computes the indices of the whole batch with
Detectron2's sampler, and then loads only its share of the images. A resumed run starts at a later
step without loading the images of earlier steps.
"""

import itertools
import os
import signal
import time
import zlib
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetFromList
from detectron2.data.samplers import RepeatFactorTrainingSampler, TrainingSampler
from detectron2.utils import comm
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import IMAGE, preserved_randomness, seed_place
from qbheat_det.data.checks import DataError, count_files, refuse_broken_half
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES, TILE, UNLABELLED

from .mappers import FixedViews, Mapper, build_mapper, find_size, number_records
from .unlabelled import build_strong_views, load_unlabelled
from .workers import find_timeout, receive_batches, share_batch, start_workers

Entry = tuple[int, int]
"""Position of an image in the infinite stream of images, and its index in the data set."""
T = TypeVar("T")

# Key by which a worker process reports the errors of the images that an image replaces. The stream
# removes it.
_SKIPPED = "skipped"
MAX_TRIES = 1000  # an error is raised if a mapper skips this many images in a row


class TrainStream(Iterable[list[dict[str, Any]]]):
    """Yields this process's share of every batch, without end.

    Attributes:
        start: the step at which the next iterator starts.
        mapper: the mapper that the next iterator uses.
        fingerprint: checksum of the records. A run can only be resumed with the same records.
        skipped: maps each image that this process could not read to its error. Unlabelled images
            are included.
        num_images: number of labelled and unlabelled images, from which the length of an epoch is
            computed. Each tile counts as an image.
        num_files: number of labelled and unlabelled images, without their tiles.
        unlabelled: stream of unlabelled images, or None. In each step, its batch is divided among
            the labelled images: each dict gets a list of unlabelled ones with the key
            ``UNLABELLED``.
        burn_in: first step with unlabelled images.
        waiting_since: ``time.monotonic()`` since when this process waits for a batch of labelled
            images; None if it does not wait.
    """

    def __init__(
        self,
        dataset: Sequence[dict[str, Any]],
        *,
        mapper: Mapper,
        batch_size: int,
        aspect_ratio_grouping: bool = False,
        size_grouping: int = 0,
        num_workers: int = 0,
        seed: int = 0,
        pin_memory: bool = False,
        repeat_factors: Tensor | None = None,
        unlabelled: "TrainStream | None" = None,
    ) -> None:
        """
        Args:
            dataset: records in Detectron2's format.
            mapper: maps a record to a dict of a batch. If it returns None or an error, the image is
                replaced by a random one.
            batch_size: number of images per step, of all processes together. The shares of the
                processes may differ by one image.
            aspect_ratio_grouping: form batches of only wide or only tall images, which need less
                padding. Every record then needs "width" and "height".
            size_grouping: form batches of augmented images of about the same size, which need even
                less padding: rounded up to multiples of this number of pixels, their sizes are
                equal. An image that has waited for a batch for one epoch joins images of other
                sizes. 0 does not group. Otherwise, every record needs "width" and "height", and the
                mapper a method ``find_size``.
            num_workers: number of worker processes. 0 loads images in this process.
            seed: seed of the order and the augmentation.
            pin_memory: return tensors in pinned memory.
            repeat_factors: how often each image is drawn, relative to an image without rare
                classes (N,); None for once. Fractions are rounded at random.
            unlabelled: stream of unlabelled images; None for supervised training.

        Raises:
            UserError: there are no images, or ``batch_size`` is below the number of processes.
        """
        if len(dataset) == 0:
            raise UserError("the training set has no images")
        if batch_size < comm.get_world_size():
            raise UserError(
                f"SOLVER.IMS_PER_BATCH is {batch_size}, below the {comm.get_world_size()} processes"
            )
        # Forked workers share one serialized array instead of copying records.
        self.dataset = DatasetFromList(list(dataset), copy=False, serialize=True)
        self.mapper = mapper
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.start = 0
        self.fingerprint = fingerprint_records(dataset)
        self.num_images = len(dataset)
        self.num_files = count_files(dataset)
        self._num_dataset_files = self.num_files
        self._skipped: dict[str, DataError] = {}
        self._pin_memory = pin_memory
        self._repeat_factors = repeat_factors
        self._is_wide: np.ndarray | None = None
        self._sizes: _AugmentedSizes | None = None
        if size_grouping:
            _check_sizes(dataset, "DATALOADER.SIZE_GROUPING")
            self._sizes = _AugmentedSizes(self.dataset, mapper, multiple=size_grouping)
        elif aspect_ratio_grouping:
            self._is_wide = _are_wide(dataset)
        self.unlabelled = unlabelled
        self.waiting_since: float | None = None
        self.burn_in = 0
        if unlabelled:
            self.num_images += unlabelled.num_images
            self.num_files += unlabelled.num_files
            self.fingerprint = zlib.crc32(str(unlabelled.fingerprint).encode(), self.fingerprint)

    @property
    def skipped(self) -> dict[str, DataError]:
        if self.unlabelled is None:
            return dict(self._skipped)
        return self._skipped | self.unlabelled.skipped

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        """Yields this process's share of each batch, as dicts that the mapper returned.

        Raises a ``UserError`` if more than half of the images cannot be read.
        """
        # As this is a generator, the workers start at the first batch. A resumed run has set
        # ``start`` and ``seed`` by then.
        rank = comm.get_rank()
        world_size = comm.get_world_size()
        shares = (cut(batch, world_size)[rank] for batch in self.batches())
        loader: Iterable[list[dict[str, Any]]] = DataLoader(
            _SeededImages(self.dataset, self.mapper, self.seed),
            batch_sampler=shares,
            num_workers=self.num_workers,
            pin_memory=self._pin_memory,
            collate_fn=share_batch,
            timeout=find_timeout(self.num_workers),
            worker_init_fn=_leave_signals_to_trainer,
            generator=torch.Generator(),  # the default draws from the global generator
        )
        batches = start_workers(loader)
        workers = getattr(batches, "_workers", ())
        unlabelled_batches = self._iterate_unlabelled()
        try:
            for step, batch in enumerate(self._receive(batches), start=self.start):
                for image in batch:
                    self._add_skipped(image.pop(_SKIPPED, ()))
                if self.unlabelled and step >= self.burn_in:
                    parts = cut(next(unlabelled_batches), len(batch))
                    for image, part in zip(batch, parts, strict=True):
                        image[UNLABELLED] = part
                yield batch
        finally:
            unlabelled_batches.close()
            # PyTorch waits some seconds for workers that ignore SIGTERM, as these do.
            del batches
            for worker in workers:
                worker.kill()

    def _receive(self, batches: Iterator[list[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
        """Yields the batches of a loader, and sets ``waiting_since`` while it waits for one."""
        received = receive_batches(batches)
        while True:
            self.waiting_since = time.monotonic()
            try:
                batch = next(received, None)
            finally:
                self.waiting_since = None
            if batch is None:
                return
            yield batch

    def _add_skipped(self, errors: Sequence[DataError]) -> None:
        """Stores errors of images. Raises a ``UserError`` if more than half of the images fail."""
        if errors:
            self._skipped |= {error.where: error for error in errors}
            refuse_broken_half(self._skipped, self._num_dataset_files, "training")

    def _iterate_unlabelled(self) -> Generator[list[dict[str, Any]]]:
        """Yields the batches of unlabelled images, from the step ``start`` or ``burn_in`` on."""
        if self.unlabelled:
            self.unlabelled.start = max(0, self.start - self.burn_in)
            self.unlabelled.seed = self.seed
            yield from self.unlabelled

    def batches(self) -> Iterator[list[Entry]]:
        """Yields the images of each step, of all processes together, from the step ``start`` on."""
        if self._repeat_factors is None:
            sampler = TrainingSampler(len(self.dataset), seed=self.seed)
        else:
            sampler = RepeatFactorTrainingSampler(self._repeat_factors, seed=self.seed)
        # ``__iter__`` of Detectron2's samplers would yield only this process's indices.
        entries = enumerate(sampler._infinite_indices())
        batches = _group_in_order(entries, self.batch_size)
        if self._sizes is not None:
            sized = self._sizes.iterate(batches, self.seed)
            batches = _group_by_shape(sized, self.batch_size, longest_wait=len(self.dataset))
        elif self._is_wide is not None:
            is_wide = self._is_wide
            shaped = ((entry, is_wide[entry[1]]) for entry in entries)
            batches = _group_by_shape(shaped, self.batch_size)
        yield from itertools.islice(batches, self.start, None)


def _leave_signals_to_trainer(worker: int) -> None:
    # A run that gets a signal to stop finishes its current step, so the workers must go on.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


class _SeededImages(Dataset[dict[str, Any]]):
    """A data set whose indices are ``Entry`` objects, so that each position has its own seed."""

    def __init__(self, dataset: DatasetFromList, mapper: Mapper, seed: int) -> None:
        self._dataset = dataset
        self._mapper = mapper
        self._seed = seed

    def __getitems__(self, entries: Sequence[Entry]) -> list[dict[str, Any]]:
        # The random generators are saved once per batch, as saving takes longer than seeding.
        with preserved_randomness():
            return [self._draw(position, index) for position, index in entries]

    def _draw(self, position: int, index: int) -> dict[str, Any]:
        """Returns the mapped image, or the mapped random image that replaces a skipped one.

        If images were skipped for errors, the result has the errors with the key ``_SKIPPED``.
        Raises a ``UserError`` if the mapper skips too many images in a row.
        """
        errors: list[DataError] = []
        generator = None
        seed_place(self._seed, IMAGE, position)
        for _ in range(MAX_TRIES):
            mapped = self._mapper(self._dataset[index])
            if isinstance(mapped, DataError):
                errors.append(mapped)
            elif mapped is not None:
                if errors:
                    return {**mapped, _SKIPPED: errors}
                return mapped
            # The replacement is random because adjacent files are often broken together.
            if generator is None:
                generator = np.random.default_rng((self._seed, position))
            index = int(generator.integers(len(self._dataset)))
        message = f"the mapper skipped {MAX_TRIES} images in a row"
        if errors:
            message += f"; the last error is {errors[-1].message}"
        raise UserError(message)


class _AugmentedSizes:
    """Finds the sizes of augmented images before they are read.

    The augmentation of an image depends only on the seed and the image's position, so drawing its
    random numbers here does not change those of the image.
    """

    def __init__(self, dataset: DatasetFromList, mapper: Mapper, *, multiple: int) -> None:
        """Raises a ``UserError`` if the mapper cannot tell the sizes of images."""
        self._dataset = dataset
        self._mapper = mapper
        self._multiple = multiple
        with preserved_randomness():
            find_size(mapper, dataset[0])  # raises an error if it cannot

    def iterate(
        self, batches: Iterable[list[Entry]], seed: int
    ) -> Iterator[tuple[Entry, tuple[int, int]]]:
        """Yields entries with the height and width of their images, as numbers of multiples."""
        for entries in batches:
            # The random generators are saved once per batch, as saving takes longer than seeding.
            with preserved_randomness():
                sizes = [self._draw(seed, position, index) for position, index in entries]
            yield from zip(entries, sizes, strict=True)

    def _draw(self, seed: int, position: int, index: int) -> tuple[int, int]:
        seed_place(seed, IMAGE, position)
        height, width = find_size(self._mapper, self._dataset[index])
        return -(-height // self._multiple), -(-width // self._multiple)


def cut(items: Sequence[T], parts: int) -> list[list[T]]:
    """Divides a sequence into consecutive parts whose lengths differ by at most one."""
    result = []
    for part in range(parts):
        start = part * len(items) // parts
        end = (part + 1) * len(items) // parts
        result.append(list(items[start:end]))
    return result


def build_train_stream(cfg: CfgNode, dataset: Sequence[dict[str, Any]]) -> TrainStream:
    """Builds the stream of the training images, with unlabelled images if the config names some.

    If ``INPUT.FIXED_VIEWS.COUNT`` is above 0, each image has this many fixed augmented views.

    Args:
        cfg: the config.
        dataset: records of the training images.

    Raises:
        UserError: there are no images, or ``DATALOADER.SAMPLER_TRAIN`` is unknown or does not fit
            the images.
    """
    repeat_factors = find_repeat_factors(cfg, dataset)
    mapper: Mapper = build_mapper(cfg, is_train=True)
    if cfg.INPUT.FIXED_VIEWS.COUNT:
        mapper = FixedViews(mapper, cfg.INPUT.FIXED_VIEWS.COUNT, cfg.INPUT.FIXED_VIEWS.SEED)
        dataset = number_records(dataset)
    settings = {
        "num_workers": cfg.DATALOADER.NUM_WORKERS,
        "seed": max(cfg.SEED, 0),
        "pin_memory": cfg.MODEL.DEVICE.startswith("cuda") and torch.cuda.is_available(),
    }
    unlabelled = None
    if cfg.DATASETS.UNLABELLED:
        unlabelled = TrainStream(
            number_records(load_unlabelled(cfg, dataset)),
            mapper=build_strong_views(cfg, mapper),
            batch_size=cfg.MODEL.SEMI.RATIO * cfg.SOLVER.IMS_PER_BATCH,
            **settings,
        )
    return TrainStream(
        dataset,
        mapper=mapper,
        batch_size=cfg.SOLVER.IMS_PER_BATCH,
        aspect_ratio_grouping=cfg.DATALOADER.ASPECT_RATIO_GROUPING,
        size_grouping=cfg.DATALOADER.SIZE_GROUPING,
        repeat_factors=repeat_factors,
        unlabelled=unlabelled,
        **settings,
    )


def find_repeat_factors(cfg: CfgNode, dataset: Sequence[dict[str, Any]]) -> Tensor | None:
    """Returns how often ``DATALOADER.SAMPLER_TRAIN`` draws each image (N,); None for once."""
    node = cfg.DATALOADER
    if node.SAMPLER_TRAIN == "TrainingSampler":
        return None
    if node.SAMPLER_TRAIN != "RepeatFactorTrainingSampler":
        raise UserError(
            f"DATALOADER.SAMPLER_TRAIN is {node.SAMPLER_TRAIN}, but only TrainingSampler and "
            "RepeatFactorTrainingSampler can be resumed exactly"
        )
    if node.REPEAT_THRESHOLD <= 0:
        raise UserError(
            "DATALOADER.SAMPLER_TRAIN RepeatFactorTrainingSampler needs a "
            "DATALOADER.REPEAT_THRESHOLD above 0: classes in a smaller share of the images are rare"
        )
    if any("annotations" not in entry for entry in dataset):
        raise UserError(
            "DATALOADER.SAMPLER_TRAIN RepeatFactorTrainingSampler needs images with boxes: use "
            "TrainingSampler"
        )
    options = {}
    if "REPEAT_SQRT" in node:  # a key of Detectron2 after 0.6
        options["sqrt"] = node.REPEAT_SQRT
    return RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
        dataset, node.REPEAT_THRESHOLD, **options
    )


def _group_in_order(entries: Iterator[Entry], batch_size: int) -> Iterator[list[Entry]]:
    """Yields batches of consecutive entries."""
    while batch := list(itertools.islice(entries, batch_size)):
        yield batch


def _group_by_shape(
    entries: Iterable[tuple[Entry, Hashable]], batch_size: int, *, longest_wait: int | None = None
) -> Iterator[list[Entry]]:
    """Yields batches of entries with equal shapes, each as soon as it is full.

    Args:
        entries: pairs of an entry and the shape of its image.
        batch_size: entries in a batch.
        longest_wait: number of entries after which an entry that still waits gets into a batch of
            those that have waited longest, whatever their shapes. None: never.
    """
    waiting: dict[Hashable, list[Entry]] = {}
    for entry, shape in entries:
        batch = waiting.setdefault(shape, [])
        batch.append(entry)
        if len(batch) == batch_size:
            yield waiting.pop(shape)
            continue
        if longest_wait is None:
            continue
        position, _ = entry
        first, _ = min(batch[0] for batch in waiting.values())
        if position - first >= longest_wait:
            everyone = sorted(itertools.chain.from_iterable(waiting.values()))
            oldest = everyone[:batch_size]
            if len(oldest) == batch_size:
                yield oldest
                waiting = _remove(waiting, oldest)


def _remove(
    waiting: Mapping[Hashable, list[Entry]], removed: Sequence[Entry]
) -> dict[Hashable, list[Entry]]:
    """Returns the lists of ``waiting`` without the entries ``removed``, and no empty lists."""
    kept = {}
    for shape, batch in waiting.items():
        rest = [entry for entry in batch if entry not in removed]
        if rest:
            kept[shape] = rest
    return kept


def _are_wide(dataset: Sequence[dict[str, Any]]) -> np.ndarray:
    """Returns whether each image or tile is wider than tall: booleans (N,)."""
    _check_sizes(dataset, "DATALOADER.ASPECT_RATIO_GROUPING")
    is_wide = []
    for entry in dataset:
        if TILE in entry:
            _, _, width, height = entry[TILE]
        else:
            width = entry["width"]
            height = entry["height"]
        is_wide.append(width > height)
    return np.array(is_wide)


def _check_sizes(dataset: Sequence[dict[str, Any]], key: str) -> None:
    """Raises a ``UserError`` that names ``key`` if a record has no width or height."""
    if any("width" not in entry or "height" not in entry for entry in dataset):
        raise UserError(f"{key} needs every image's width and height")


def fingerprint_records(dataset: Sequence[dict[str, Any]]) -> int:
    """Returns a checksum of the images' file names, ids, boxes, annotated classes and order.

    Folders do not matter, so it stays equal if a data set is moved.
    """
    value = 0
    for entry in dataset:
        name = os.path.basename(str(entry.get("file_name", "")))
        boxes = [(a.get("category_id"), a.get("bbox")) for a in entry.get("annotations", ())]
        text = f"{entry.get('image_id')} {name} {boxes}\n"
        if ANNOTATED_CLASSES in entry:
            text += f"{list(entry[ANNOTATED_CLASSES])}\n"
        value = zlib.crc32(text.encode(errors="surrogateescape"), value)  # names may not be UTF-8
    return value

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Selects the images to label next from a pool of unlabelled images.

Without a detector, the selection is random, or its images are as different as possible. With a
detector, it has the images with many objects of all classes. Near-duplicates are left out. The
feature vectors of the images are cached on disk.
"""

import itertools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from detectron2.data import DatasetCatalog
from torch import Tensor
from tqdm import tqdm

from qbheat_det.api import (
    Detector,
    UnreadableImage,
    embed_images,
    find_inputs,
    load_detector,
)
from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    Account,
    DataSource,
    forget_source,
    join_accounts,
    open_source,
    register_source,
)

from .coverage import COVERING, choose_balanced, cover, find_duplicates, unit_vectors

Strategy = Literal["random", "k_center", "balanced"]
BoxesByPath = dict[str, list[dict[str, Any]]]
"""Boxes in COCO's results format, by the path of their image."""
BALANCED: Strategy = "balanced"  # needs a detector
_SET = "images_with_labels"
_MIN_SCORE = 0.05


@dataclass(frozen=True)
class Pool:
    """Images with and without labels, and their features.

    Attributes:
        files: paths of all readable images, starting with the labelled images.
        names: maps the paths of images without labels to their names relative to their folder.
        vectors: unit vectors (N, D) of ``files``.
        num_labelled: number of labelled images.
        free: indices in ``files`` of the images that can be selected.
        repeated: maps the path of each near-duplicate, which is left out, to the path of the image
            that it repeats.
        unreadable: maps the path of each unreadable image to the reason.
        account: what is used and left out of the data sets with labels.
    """

    files: list[str]
    names: dict[str, str] = field(repr=False)
    vectors: Tensor = field(repr=False)
    num_labelled: int
    free: list[int]
    repeated: dict[str, str]
    unreadable: dict[str, str]
    account: Account = field(default_factory=Account, repr=False)


@dataclass(frozen=True)
class Selection:
    """The images to label next.

    Attributes:
        files: paths of the selected images, in the order of selection.
        pool: the images from which they were selected.
        boxes: the detector's boxes by path; empty without a detector.
        class_names: maps category ids to the detector's class names.
        skipped: paths that ``skip`` removed.
        strategy: the strategy that selected them.
    """

    files: list[str]
    pool: Pool
    boxes: BoxesByPath = field(default_factory=dict)
    class_names: dict[int, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    strategy: Strategy = "random"
    _chooser: "_Chooser | None" = field(default=None, repr=False)

    def skip(self, path: str) -> "Selection":
        """Returns a selection without ``path``, and with the strategy's next image at the end.

        The next image was neither selected nor skipped before. If no such image is left, the
        selection becomes smaller.
        """
        assert self._chooser
        new_files = self._chooser.choose(1, {*self.files, *self.skipped})
        kept_files = [file for file in self.files if file != path]
        return replace(
            self,
            files=kept_files + new_files,
            boxes=self.boxes | self._chooser.predict(new_files),
            skipped=(*self.skipped, path),
        )


class _Chooser:
    """Selects images from a pool with a strategy. Keeps the detector's boxes between calls."""

    def __init__(self, pool: Pool, strategy: Strategy, seed: int, detector: Detector | None):
        # The labelled images, then the images that can be selected.
        rows = [*range(pool.num_labelled), *pool.free]
        self._files = [pool.files[i] for i in rows]
        self._vectors = pool.vectors[rows]
        self._num_labelled = pool.num_labelled
        self._strategy = strategy
        self._seed = seed
        self._detector = detector
        self._boxes: BoxesByPath | None = None  # of all files, for "balanced"
        if detector and strategy == BALANCED:
            self._boxes = predict_boxes(self._files, detector)

    def predict(self, files: Sequence[str]) -> BoxesByPath:
        """Returns the detector's boxes of ``files`` by path; empty without a detector."""
        if self._boxes is not None:
            return {path: self._boxes[path] for path in files if path in self._boxes}
        if self._detector:
            return predict_boxes(files, self._detector)
        return {}

    def choose(self, budget: int, seen: Collection[str] = ()) -> list[str]:
        """Returns up to ``budget`` paths to label. Paths in ``seen`` count as labelled."""
        labelled = list(range(self._num_labelled))
        labelled += [i for i, path in enumerate(self._files) if path in seen]
        if self._boxes is not None:
            counts = count_objects(self._files, self._boxes)
            chosen = choose_balanced(self._vectors, counts, budget, labelled)
        else:
            chosen = cover(self._strategy, self._vectors, budget, labelled, seed=self._seed)
        return [self._files[i] for i in chosen]


def select(
    images: str | Path | Sequence[str | Path],
    budget: int,
    *,
    weights: str | Path | None = None,
    data: str | Path | None = None,
    val: str | Path | None = None,
    encoder: str = "distill/285M",
    strategy: Strategy | None = None,
    device: str | None = None,
    seed: int = 0,
    max_left_out: float | None = None,
) -> Selection:
    """Selects images to label next.

    Args:
        images: images and folders to select from. Folders are searched recursively.
        budget: number of images to select.
        weights: trained detector, whose predictions decide which images are selected; None in the
            first round.
        data: labelled images, in any format of ``--data``. Neither these images, including their
            validation part, nor near-duplicates of them are selected. If the images of a label file
            are not next to it, they are searched in the folders of ``images``.
        val: validation images, in the same formats as ``data``. They are not selected either.
        encoder: weights of the encoder whose features are compared.
        strategy: by default "balanced" if ``weights`` are given, else "random".
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.
        seed: seed of "random".
        max_left_out: share of images or boxes of ``data`` and ``val`` that may have faults; by
            default 0.1.

    Raises:
        UserError: the budget is below 1 or larger than the pool, the seed is negative, ``weights``
            are not those of a detector, or the strategy is unknown or needs ``weights``.
    """
    strategy = _check_strategy(strategy, has_detector=bool(weights))
    check_whole("budget", budget, minimum=1)
    check_whole("seed", seed)
    detector: Detector | None = None
    if weights:
        detector = load_detector(weights, device=device)
    if isinstance(images, str | Path):
        images = [images]
    inputs = [str(path) for path in images]
    labelled, account = _list_all_labelled([data, val], inputs, max_left_out)
    pool = open_pool(inputs, labelled, encoder, budget, device)
    pool = replace(pool, account=account)
    chooser = _Chooser(pool, strategy, seed, detector)
    files = chooser.choose(budget)
    return Selection(
        files=files,
        pool=pool,
        boxes=chooser.predict(files),
        class_names=_name_categories(detector),
        strategy=strategy,
        _chooser=chooser,
    )


def _check_strategy(strategy: Strategy | None, *, has_detector: bool) -> Strategy:
    """Returns the strategy; if it is None, "balanced" with a detector, and "random" without."""
    if strategy is None:
        return BALANCED if has_detector else "random"
    strategies = (*COVERING, BALANCED)
    if strategy not in strategies:
        raise UserError(f"there is no strategy '{strategy}': use one of {', '.join(strategies)}")
    if strategy == BALANCED and not has_detector:
        raise UserError(f"the strategy '{strategy}' needs a detector: add --weights RUN")
    return strategy


def _list_all_labelled(
    sources: Sequence[str | Path | None], images: Sequence[str], max_left_out: float | None
) -> tuple[list[str], Account]:
    """Returns the images of labelled data sets, without repetitions, and their account."""
    files: list[str] = []
    accounts: list[Account] = []
    for source in sources:
        if source:
            source_files, account = list_labelled(str(source), images, max_left_out)
            files += source_files
            accounts.append(account)
    return list(dict.fromkeys(files)), join_accounts(accounts)


def _name_categories(detector: Detector | None) -> dict[int, str]:
    """Returns the names of a detector's classes by their ids; empty without a detector."""
    if detector is None:
        return {}
    names = detector.class_names
    ids = detector.cfg.MODEL.CATEGORY_IDS or range(1, len(names) + 1)
    return dict(zip(ids, names, strict=False))


def check_whole(name: str, value: object, minimum: int = 0) -> None:
    """Raises a ``UserError`` if an argument is not a whole number of at least ``minimum``."""
    if not isinstance(value, Integral) or value < minimum:
        raise UserError(f"--{name} is {value}, but must be a whole number of at least {minimum}")


def open_pool(
    images: Sequence[str],
    labelled: Sequence[str],
    encoder: str,
    budget: int,
    device: str | None,
) -> Pool:
    """Computes the features of all images, and finds near-duplicates.

    Args:
        images: images and folders to select from.
        labelled: paths of the labelled images.
        encoder: weights of the encoder that computes the features.
        budget: number of images to select.
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.

    Raises:
        UserError: fewer than ``budget`` images can be selected.
    """
    inputs = [file for file in find_inputs(images) if not file.is_video]
    labelled_paths = {os.path.realpath(path) for path in labelled}
    unlabelled = {}  # names by path
    for file in inputs:
        if os.path.realpath(file.path) not in labelled_paths:
            unlabelled[str(file.path)] = file.name
    if budget > len(unlabelled):
        raise UserError(
            f"--budget is {budget}, but there are {len(inputs):,} images, of which "
            f"{len(unlabelled):,} have no labels"
        )
    files, features, unreadable = embed_images([*labelled, *unlabelled], encoder, device=device)
    vectors = unit_vectors(features)
    first = find_duplicates(vectors, features).tolist()  # the first image of each group
    num_labelled = sum(path not in unreadable for path in labelled)
    free = []
    repeated = {}
    # Labelled images come first in ``files``, so an image that repeats one of them is left out.
    for index in range(num_labelled, len(files)):
        if first[index] == index:
            free.append(index)
        else:
            repeated[files[index]] = files[first[index]]
    if budget > len(free):
        raise UserError(
            f"--budget is {budget}, but only {len(free):,} images are left: {len(unreadable):,} "
            f"cannot be read, {len(repeated):,} repeat others"
        )
    return Pool(files, unlabelled, vectors, num_labelled, free, repeated, unreadable)


def list_labelled(
    data: str, folders: Sequence[str] = (), max_left_out: float | None = None
) -> tuple[list[str], Account]:
    """Returns the image paths of a labelled data set, and its account.

    The paths include those of the validation part. If ``data`` is a label file, its images are
    searched next to it, and then in each of the ``folders``. The place with the fewest missing
    images is used.

    Raises:
        UserError: the data set is invalid in all places, or more than ``max_left_out`` of its
            images or boxes have faults.
    """
    roots = [""]  # next to the label file
    if os.path.isfile(data):
        roots += [folder for folder in folders if os.path.isdir(folder)]
    errors: list[UserError] = []
    candidates: list[tuple[int, DataSource, Account]] = []
    for root in roots:
        try:
            source = open_source(data, root)
            account = source.account or Account()
        except UserError as error:
            errors.append(error)
            continue
        num_missing = sum(entry.item == "missing image" for entry in account.left_out)
        candidates.append((num_missing, source, account))
        if not num_missing:
            break
    if not candidates:
        raise errors[0]
    _, source, account = min(candidates, key=lambda candidate: candidate[0])
    account.check(max_left_out)
    files: list[str] = []
    for part in (source.train, source.val):
        if part is None:
            continue
        try:
            annotations = source.annotations.get(part.part)
            register_source(_SET, part.without_labels(), annotations=annotations)
            files += [str(record["file_name"]) for record in DatasetCatalog.get(_SET)]
        finally:
            forget_source(_SET)
    return files, account


def predict_boxes(files: Sequence[str], detector: Detector) -> BoxesByPath:
    """Returns the detector's boxes of each image that has any. Unreadable images are left out."""
    boxes: BoxesByPath = {}
    for path in tqdm(files, unit="file", desc="predicting", disable=None):
        try:
            detections = detector.predict(path, threshold=_MIN_SCORE)
        except UnreadableImage:
            continue
        if len(detections):
            boxes[path] = detections.to_coco()
    return boxes


def count_objects(files: Sequence[str], boxes: BoxesByPath) -> Tensor:
    """Estimates the number of objects (N, K) of each image and each of the K classes in ``boxes``.

    The estimate is the sum of the squared scores of the boxes. Without the square, the many boxes
    with low scores would dominate.
    """
    category_ids = sorted({box["category_id"] for box in itertools.chain(*boxes.values())})
    column_of = {category_id: column for column, category_id in enumerate(category_ids)}
    counts = torch.zeros(len(files), len(category_ids), dtype=torch.float64)
    for row, path in enumerate(files):
        for box in boxes.get(path, ()):
            counts[row, column_of[box["category_id"]]] += box["score"] ** 2
    return counts

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Selects the images to label next from a pool of unlabelled images.

Without a detector, the selection is random or covers the pool (see ``coverage``). With a detector,
the selection consists of images with many objects of all classes. Near-duplicates are left out. The
feature vectors of the images are cached on disk.
"""

import itertools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    Account,
    DataSource,
    join_accounts,
    open_source,
)
from qbheat_det.data.datasets.sources import forget_source, register_source
from qbheat_det.inference.files import get_predictor, open_weights, predict_images
from qbheat_det.inference.images import InputFile, find_inputs
from qbheat_det.inference.predict import Predictor, is_classifier

from .coverage import COVERING, choose_balanced, cover, find_duplicates, unit_vectors
from .embedding import embed_images

Strategy = Literal["random", "k_center", "balanced"]
Boxes = dict[str, list[dict[str, Any]]]
BALANCED: Strategy = "balanced"  # needs a detector
_SET = "images_with_labels"
_LEAST_SCORE = 0.05


class Detector(NamedTuple):
    """A trained detector and its config."""

    predictor: Predictor
    cfg: CfgNode


@dataclass(frozen=True)
class Pool:
    """Images with and without labels, and their features.

    Attributes:
        files: paths of all readable images, starting with the labelled images.
        names: maps the paths of images without labels to their names relative to their folder.
        vectors: unit vectors (N, D) of ``files``.
        num_labelled: number of labelled images.
        free: indices of the images that can be selected.
        repeated: maps each image that is left out as a near-duplicate to the image it repeats.
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
        boxes: maps paths to the detector's boxes in COCO's format; empty without a detector.
        class_names: maps category ids to the detector's class names.
        skipped: paths that ``skip`` removed.
        strategy: the strategy that selected them.
    """

    files: list[str]
    pool: Pool
    boxes: Boxes = field(default_factory=dict)
    class_names: dict[int, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    strategy: Strategy = "random"
    _chooser: "_Chooser | None" = field(default=None, repr=False)

    def skip(self, path: str) -> "Selection":
        """Returns a selection without ``path``. The strategy's next image is added at the end.

        The next image was neither selected nor skipped before. If none is left, none is added.
        """
        assert self._chooser
        new = self._chooser.choose(1, {*self.files, *self.skipped})
        files = [*(file for file in self.files if file != path), *new]
        boxes = {**self.boxes, **self._chooser.predict(new)}
        return replace(self, files=files, boxes=boxes, skipped=(*self.skipped, path))


class _Chooser:
    """Selects images from a pool with a strategy."""

    def __init__(self, pool: Pool, strategy: Strategy, seed: int, detector: Detector | None):
        rows = [*range(pool.num_labelled), *pool.free]
        self._files, self._vectors = [pool.files[i] for i in rows], pool.vectors[rows]
        self._num_labelled, self._strategy, self._seed = pool.num_labelled, strategy, seed
        self._detector = detector
        self._boxes: Boxes | None = None
        if detector and strategy == BALANCED:
            self._boxes = predict_boxes(self._files, detector)

    def predict(self, files: Sequence[str]) -> Boxes:
        """Returns the detector's boxes of ``files`` by path; empty without a detector."""
        if self._boxes is not None:
            return {path: self._boxes[path] for path in files if path in self._boxes}
        return predict_boxes(files, self._detector) if self._detector else {}

    def choose(self, budget: int, seen: Collection[str] = ()) -> list[str]:
        """Returns up to ``budget`` paths to label. Paths in ``seen`` count as labelled."""
        known = range(self._num_labelled)
        taken = [*known, *(i for i, path in enumerate(self._files) if path in seen)]
        vectors = self._vectors
        if self._boxes is not None:
            counts = count_objects(self._files, self._boxes)
            chosen = choose_balanced(vectors, counts, budget, taken)
        else:
            chosen = cover(self._strategy, vectors, budget, taken, seed=self._seed)
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
        data: labelled images, in any format of ``--data``. These images, including their validation
            part, and near-duplicates of them are not selected. If the images of a label
            file are not next to it, they are searched in the folders of ``images``.
        val: validation images, which are not selected either. The same formats as ``data``.
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
    strategy = strategy or (BALANCED if weights else "random")
    if strategy not in (*COVERING, BALANCED):
        known = ", ".join([*COVERING, BALANCED])
        raise UserError(f"there is no strategy '{strategy}': use one of {known}")
    if strategy == BALANCED and not weights:
        raise UserError(f"the strategy '{strategy}' needs a detector: add --weights RUN")
    check_whole("budget", budget, least=1)
    check_whole("seed", seed)
    detector = open_detector(weights, device) if weights else None
    names = [*map(str, [images] if isinstance(images, str | Path) else images)]
    given = [str(source) for source in (data, val) if source]
    found = [list_labelled(source, names, max_left_out) for source in given]
    labelled = list(dict.fromkeys(itertools.chain(*(files for files, _ in found))))
    pool = _open_pool(names, labelled, encoder, budget, device)
    pool = replace(pool, account=join_accounts(account for _, account in found))
    chooser = _Chooser(pool, strategy, seed, detector)
    files = chooser.choose(budget)
    classes: dict[int, str] = {}
    if detector:
        model = detector.cfg.MODEL
        ids = model.CATEGORY_IDS or range(1, len(model.CLASS_NAMES) + 1)
        classes = dict(zip(ids, model.CLASS_NAMES, strict=False))
    return Selection(
        files, pool, chooser.predict(files), classes, strategy=strategy, _chooser=chooser
    )


def check_whole(name: str, value: object, least: int = 0) -> None:
    """Raises a ``UserError`` if an argument is not a whole number of at least ``least``."""
    if not isinstance(value, Integral) or value < least:
        raise UserError(f"--{name} is {value}, but must be a whole number of at least {least}")


def _open_pool(
    images: Sequence[str],
    labelled: Sequence[str],
    encoder: str,
    budget: int,
    device: str | None,
) -> Pool:
    """Computes the features of all images, and finds near-duplicates."""
    found = [one for one in find_inputs(images) if not one.is_video]
    real = {os.path.realpath(path) for path in labelled}
    unlabelled = {
        str(one.path): one.name for one in found if os.path.realpath(one.path) not in real
    }
    if budget > len(unlabelled):
        raise UserError(
            f"--budget is {budget}, but there are {len(found):,} images, of which "
            f"{len(unlabelled):,} have no labels"
        )
    files, features, unreadable = embed_images([*labelled, *unlabelled], encoder, device=device)
    vectors = unit_vectors(features)
    first = find_duplicates(vectors, features).tolist()
    count = sum(path not in unreadable for path in labelled)
    others = range(count, len(files))
    free = [i for i in others if first[i] == i]
    repeated = {files[i]: files[first[i]] for i in others if first[i] != i}
    if budget > len(free):
        raise UserError(
            f"--budget is {budget}, but only {len(free):,} images are left: {len(unreadable):,} "
            f"cannot be read, {len(repeated):,} repeat others"
        )
    return Pool(files, unlabelled, vectors, count, free, repeated, unreadable)


def list_labelled(
    data: str, folders: Sequence[str] = (), max_left_out: float | None = None
) -> tuple[list[str], Account]:
    """Returns the image paths of a labelled data set with its validation part, and its account.

    The images of a label file are searched next to it, and then in each of the ``folders``.
    """
    roots = [folder for folder in folders if os.path.isdir(folder) and os.path.isfile(data)]
    errors: list[UserError] = []
    found: list[tuple[int, DataSource, Account]] = []
    for root in ["", *roots]:
        try:
            source = open_source(data, root)
            account = source.account or Account()
        except UserError as error:
            errors.append(error)
            continue
        missing = sum(one.item == "missing image" for one in account.left_out)
        found.append((missing, source, account))
        if not missing:
            break
    if not found:
        raise errors[0]
    _, source, account = min(found, key=lambda one: one[0])
    account.check(max_left_out)
    return _list_images(source), account


def _list_images(source: DataSource) -> list[str]:
    files: list[str] = []
    for part in filter(None, (source.train, source.val)):
        try:
            annotations = source.annotations.get(part.part)
            register_source(_SET, part.without_labels(), annotations=annotations)
            files += [str(record["file_name"]) for record in DatasetCatalog.get(_SET)]
        finally:
            forget_source(_SET)
    return files


def open_detector(weights: str | Path, device: str | None = None) -> Detector:
    """Opens a trained detector. Raises a ``UserError`` if the weights are not of a detector."""
    exported, cfg = open_weights(str(weights), device=device)
    if is_classifier(cfg):
        raise UserError(f"'{weights}' is a classifier: --weights needs a detector")
    return Detector(get_predictor(exported, cfg), cfg)


def predict_boxes(files: Sequence[str], detector: Detector) -> Boxes:
    """Maps the path of each image with detections to its boxes in COCO's results format."""
    found = predict_images(
        detector.predictor,
        [InputFile(Path(path), path) for path in files],
        detector.cfg,
        score_threshold=_LEAST_SCORE,
    )
    boxes: Boxes = {}
    for box in found.results:
        boxes.setdefault(box["file_name"], []).append(box)
    return boxes


def count_objects(files: Sequence[str], boxes: Boxes) -> Tensor:
    """Estimates the number of objects (N, K) of each image and each of the K classes in ``boxes``.

    The estimate is the sum of the squared scores of the boxes, because many have low scores.
    """
    ids = sorted({box["category_id"] for own in boxes.values() for box in own})
    counts = torch.zeros(len(files), len(ids), dtype=torch.float64)
    for row, path in zip(counts, files, strict=True):
        for box in boxes.get(path, ()):
            row[ids.index(box["category_id"])] += box["score"] ** 2
    return counts

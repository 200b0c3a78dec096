# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Selects the images to label next, from thousands without labels.

Without a detector, the selection covers the pool (``coverage``). With a detector, it takes images
that the detector is uncertain about, and among these images that differ from each other.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from detectron2.data import DatasetCatalog
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.data import open_source
from qbheat_det.data.datasets.sources import forget_source, register_source
from qbheat_det.inference.files import get_predictor, open_weights, predict_images
from qbheat_det.inference.images import InputFile, find_inputs
from qbheat_det.inference.predict import is_classifier

from .coverage import find_duplicates, k_center, prob_cover, typiclust, unit_vectors
from .embeddings import embed_images

Strategy = Literal["typiclust", "prob_cover", "k_center", "uncertainty"]
COVERING = {"typiclust": typiclust, "prob_cover": prob_cover, "k_center": k_center}
_CANDIDATES = 4  # uncertain images for each one that is chosen
_SET = "images_with_labels"
_LEAST_SCORE = 0.05


@dataclass(frozen=True)
class Pool:
    """Images with and without labels, and their features.

    Attributes:
        files: paths of all images that can be read, those with labels first.
        vectors: unit vectors (N, D) of these images.
        labelled, free: indices of images with labels, and of those that can be selected.
        repeated: images left out because they nearly repeat another one, which is the value.
        unreadable: reasons by path.
    """

    files: list[str]
    vectors: Tensor
    labelled: list[int]
    free: list[int]
    repeated: dict[str, str]
    unreadable: dict[str, str]


@dataclass(frozen=True)
class PoolBoxes:
    """Boxes of a detector on images, in COCO's format: results and images as in ``Predictions``.

    ``uncertainties`` has a value for each image.
    """

    results: list[dict[str, Any]]
    images: list[dict[str, Any]]
    class_names: list[str]
    category_ids: list[int]
    uncertainties: Tensor

    def of(self, files: Sequence[str]) -> "PoolBoxes":
        """Returns the boxes of some images, in their order."""
        order = {path: place for place, path in enumerate(files)}
        images = [image for image in self.images if image["file_name"] in order]
        images.sort(key=lambda image: order[image["file_name"]])
        results = [box for box in self.results if box["file_name"] in order]
        places = {image["file_name"]: i for i, image in enumerate(self.images)}
        values = self.uncertainties[[places[path] for path in files]]
        return PoolBoxes(results, images, self.class_names, self.category_ids, values)


@dataclass(frozen=True)
class Selection:
    """The images to label next, in the order of choice, with boxes of the detector if any."""

    files: list[str]
    pool: Pool
    boxes: PoolBoxes | None = None


def select(
    images: str | Path | Sequence[str | Path],
    budget: int,
    *,
    weights: str | Path | None = None,
    data: str | None = None,
    encoder: str = "distill/285M",
    strategy: Strategy | None = None,
    device: str | None = None,
    seed: int = 0,
) -> Selection:
    """Selects images to label next.

    Args:
        images: images and folders, searched recursively.
        budget: number of images to select.
        weights: a trained detector, whose uncertainty decides; None for the first round.
        data: the images that have labels, in any format of ``--data``, with their validation part.
            Neither they nor near-duplicates of them are selected.
        encoder: weights of the encoder that compares images.
        strategy: "uncertainty" by default with ``weights``, else "typiclust".
        device: "cpu" or "cuda"; by default cuda where there is a GPU.
        seed: of the clustering.

    Raises:
        UserError: the budget is larger than the pool, weights cannot be read, or the strategy
            needs weights.
    """
    strategy = strategy or ("uncertainty" if weights else "typiclust")
    _check(strategy, budget, weights)
    pool = open_pool(images, data, encoder, device=device)
    if budget > len(pool.free):
        raise UserError(
            f"--budget is {budget}, but only {len(pool.free)} images are left: "
            f"{len(pool.unreadable)} cannot be read, {len(pool.repeated)} repeat others"
        )
    rows = [*pool.labelled, *pool.free]
    taken, vectors = list(range(len(pool.labelled))), pool.vectors[rows]
    boxes = None
    if strategy == "uncertainty":
        boxes = predict_boxes([pool.files[i] for i in pool.free], str(weights), device)
        values = torch.cat([torch.full((len(taken),), -torch.inf), boxes.uncertainties])
        chosen = choose_uncertain(vectors, values, budget, taken)
    else:
        settings = {} if strategy == "k_center" else {"seed": seed}
        chosen = COVERING[strategy](vectors, budget, taken, **settings)
    files = [pool.files[rows[i]] for i in chosen]
    if weights and boxes is None:
        boxes = predict_boxes(files, str(weights), device)
    return Selection(files, pool, boxes and boxes.of(files))


def choose_uncertain(
    vectors: Tensor, uncertainties: Tensor, budget: int, taken: Sequence[int]
) -> list[int]:
    """Returns ``budget`` uncertain images that differ from each other and from the labelled ones.

    The candidates are the most uncertain images, four times the budget; ``k_center`` chooses among
    them.

    Args:
        vectors: unit vectors (N, D).
        uncertainties: (N,), -inf for labelled images.
        budget: number of images.
        taken: indices of labelled images.
    """
    order = uncertainties.argsort(descending=True, stable=True)
    candidates = order[: min(_CANDIDATES * budget, len(vectors) - len(taken))]
    near = [*taken, *candidates.tolist()]
    most = len(taken)
    others = k_center(vectors[near], budget - 1, [*range(most), most])
    return [near[i] for i in (most, *others)]


def _check(strategy: str, budget: int, weights: str | Path | None) -> None:
    if strategy not in (*COVERING, "uncertainty"):
        known = ", ".join([*COVERING, "uncertainty"])
        raise UserError(f"there is no strategy '{strategy}': use one of {known}")
    if strategy == "uncertainty" and not weights:
        raise UserError("the strategy 'uncertainty' needs a detector: add --weights RUN")
    if budget < 1:
        raise UserError(f"--budget is {budget}, but must be at least 1")


def open_pool(
    images: str | Path | Sequence[str | Path],
    data: str | None,
    encoder: str,
    *,
    device: str | None = None,
) -> Pool:
    """Embeds the images with and without labels, and finds near-duplicates among them."""
    names = [images] if isinstance(images, str | Path) else images
    inputs = [file for file in find_inputs([str(name) for name in names]) if not file.is_video]
    labelled = list_labelled(data) if data else []
    real = {os.path.realpath(path) for path in labelled}
    unlabelled = [path for file in inputs if os.path.realpath(path := str(file.path)) not in real]
    embedded = embed_images([*labelled, *unlabelled], encoder, device=device)
    files, vectors = embedded.files, unit_vectors(embedded.vectors)
    first = find_duplicates(vectors).tolist()
    count = sum(path in embedded.unreadable for path in labelled)
    count = len(labelled) - count
    return Pool(
        files=files,
        vectors=vectors,
        labelled=list(range(count)),
        free=[i for i in range(count, len(files)) if first[i] == i],
        repeated={files[i]: files[first[i]] for i in range(count, len(files)) if first[i] != i},
        unreadable=embedded.unreadable,
    )


def list_labelled(data: str) -> list[str]:
    """Returns the paths of the images of a labelled data set, its validation part included."""
    source = open_source(data)
    files: list[str] = []
    for part in filter(None, (source.train, source.val)):
        try:
            register_source(_SET, {**part, "labelled": False})
            files += [str(record["file_name"]) for record in DatasetCatalog.get(_SET)]
        finally:
            forget_source(_SET)
    return files


def predict_boxes(files: Sequence[str], weights: str, device: str | None) -> PoolBoxes:
    """Predicts boxes on images with any trained detector.

    Raises:
        UserError: the weights are not a detector's, or cannot be read.
    """
    exported, cfg = open_weights(weights, device=device)
    if is_classifier(cfg):
        raise UserError(f"'{weights}' is a classifier: --weights takes a detector")
    found = predict_images(
        get_predictor(exported, cfg),
        [InputFile(Path(path), path) for path in files],
        cfg,
        score_threshold=_LEAST_SCORE,
    )
    scores: dict[str, list[float]] = {path: [] for path in files}
    for box in found.results:
        scores[box["file_name"]].append(box["score"])
    values = torch.tensor([uncertainty(scores[path]) for path in files])
    names, ids = list(cfg.MODEL.CLASS_NAMES), list(cfg.MODEL.CATEGORY_IDS)
    return PoolBoxes(found.results, found.images, names, ids, values)


def uncertainty(scores: Sequence[float]) -> float:
    """Returns the sum of the binary entropies of an image's detections, in nats."""
    p = torch.tensor(scores, dtype=torch.float64)
    return float(torch.special.entr(p).sum() + torch.special.entr(1 - p).sum())

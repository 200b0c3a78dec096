# Copyright (c) qbheat_det contributors. Apache-2.0.
"""QB-Heat: pre-training by predicting the features of an image linearly from a visible quarter.

Paper: "Self-Supervised Learning based on Heat Equation" (QB-Heat), Chen et al., arXiv:2211.13228,
Sec. 3, 4 and Appendix A. Features at a distance Δx are predicted by a finite difference (Eq. 5),
z(x + Δx, y) = (I + Δx A) z(x, y), with one matrix for each of eight directions.

The paper does not state the following details:

* The learned parameter is the matrix M = Δx A, which starts at zero.
* The matrix C_ij predicts diagonally, in the directions of A_i and B_j together.
* The four corners are equally frequent in a batch.
* With Mobile-Former, the objective learns from the output "s16_expanded", which the paper's
  classifiers and decoders read. If it learned from an earlier feature map, the last convolution
  would keep its random weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.config import configurable
from qbheat_det.modeling.checks import check_value

from .reconstruction import ReconstructionDecoder, ReconstructionModel

CORNERS = ("top_left", "top_right", "bottom_left", "bottom_right")
QUADRANTS = (*CORNERS, "centre")
"""Names of the positions of the visible quarter. The index of a corner is 2 * row + column."""
QUADRANTS_OF = {"corner": CORNERS, "centre": ("centre",), "both": QUADRANTS}
"""Positions of the visible quarter by value of ``MODEL.QB_HEAT.VISIBLE``."""
DIRECTIONS: dict[str, tuple[int, int]] = {
    "A1": (1, 0),
    "A2": (-1, 0),
    "B1": (0, 1),
    "B2": (0, -1),
    "C11": (1, 1),
    "C12": (1, -1),
    "C21": (-1, 1),
    "C22": (-1, -1),
}
"""Signs of Δx (right) and Δy (down) for each matrix. The keys are the paper's names."""
_NAME_OF_DIRECTION = {signs: name for name, signs in DIRECTIONS.items()}
OFFSETS = {"corner": 1 / 2, "centre": 1 / 4}
"""Distance Δx relative to the side of the image, by kind of visible quarter.

It is also the side of a predicted block.
"""
_EXPLICIT = {8: tuple(DIRECTIONS), 4: ("A1", "A2", "B1", "B2"), 2: ("A1", "B1")}
"""Names of the learned matrices, by their number."""


class LinearModels(nn.Module):
    """Eight matrices (C, C) that predict features at one distance Δx, one for each direction.

    They are the paper's A, B and C times Δx. Some are parameters with the paper's names. The others
    are computed from these parameters.
    """

    def __init__(self, *, dim: int, num_models: int, offset: float) -> None:
        """Takes the width C, the number of parameters (8, 4 or 2), and Δx from ``OFFSETS``."""
        super().__init__()
        known = tuple(_EXPLICIT)
        check_value(num_models in known, "QB_HEAT.NUM_MODELS", num_models, f"one of {known}")
        check_value(dim >= 1, "QB_HEAT.FEATURE_DIM", dim, "at least 1")
        self.offset = offset
        for name in _EXPLICIT[num_models]:
            self.register_parameter(name, nn.Parameter(torch.zeros(dim, dim)))

    def matrices(self) -> dict[str, Tensor]:
        """Returns all eight matrices by the names in ``DIRECTIONS``, in float32, with gradients."""
        models: dict[str, Tensor] = dict(self.named_parameters(recurse=False))
        if "A2" not in models:  # Eq. 9
            models["A2"] = -models["A1"]
            models["B2"] = -models["B1"]
        if "C11" in models:
            return models
        # Autocast would round the products.
        with torch.autocast(models["A1"].device.type, enabled=False):
            for i, j in product("12", "12"):  # Eq. 12
                a = models[f"A{i}"]
                b = models[f"B{j}"]
                models[f"C{i}{j}"] = a + b + (a @ b + b @ a) / 2
        return models


class HeatPredictor(nn.Module):
    """Predicts the features of the whole image from the visible quarter's features.

    A visible corner predicts the three remaining quarters, at an offset of half the image. A
    visible centre is split into quarters. Each of them predicts the three adjacent blocks in its
    corner of the image, at an offset of a quarter of the image.
    """

    def __init__(self, *, dim: int, num_models: int = 8, visible: str = "both") -> None:
        """
        Args:
            dim: C, the channels of the features.
            num_models: number of learned matrices for each distance: 8, 4 or 2.
            visible: kind of visible quarter: "corner", "centre" or "both".
        """
        super().__init__()
        known = (*OFFSETS, "both")
        check_value(visible in known, "QB_HEAT.VISIBLE", visible, f"one of {known}")
        self.dim = dim
        self.visible = visible
        self.scales = nn.ModuleDict(
            {
                kind: LinearModels(dim=dim, num_models=num_models, offset=offset)
                for kind, offset in OFFSETS.items()
                if visible in (kind, "both")
            }
        )

    def forward(self, z: Tensor, counts: Sequence[int]) -> Tensor:
        """Takes the features (N, H, W, C) of the visible quarters of N images.

        Images are sorted by the position of the visible quarter. ``counts`` are the numbers of
        images for each of ``QUADRANTS``. Returns the features (N, 2H, 2W, C) of the whole images.
        They contain the visible features, unchanged.
        """
        *corners, centre = z.split(list(counts))
        # Empty groups are processed too, so that all matrices have gradients on all processes.
        images = []
        if "corner" in self.scales:
            models = cast(LinearModels, self.scales["corner"]).matrices()
            for corner, quarter in enumerate(corners):
                images.append(extend(quarter, corner, models))
        if "centre" in self.scales:
            models = cast(LinearModels, self.scales["centre"]).matrices()
            # The four blocks of the centre are extended to the four quarters of the image.
            top, bottom = centre.chunk(2, dim=1)
            blocks = [*top.chunk(2, dim=2), *bottom.chunk(2, dim=2)]  # in the order of CORNERS
            quarters = []
            for corner, block in enumerate(blocks):
                # The block is in the corner of its quarter next to the center of the image. For
                # the top left quarter, this is the bottom right corner.
                inner_corner = 3 - corner
                quarters.append(extend(block, inner_corner, models))
            images.append(tile(quarters))
        return torch.cat(images)


def extend(z: Tensor, corner: int, models: Mapping[str, Tensor]) -> Tensor:
    """Extends a block (N, H, W, C) in one corner of an area to the whole area (N, 2H, 2W, C).

    ``corner`` is the index of this corner, 2 * row + column. ``models`` are the matrices (C, C) by
    name, with the keys of ``DIRECTIONS``.
    """
    row, column = divmod(corner, 2)
    # The matrix for each of the three other blocks, by the direction from the visible block.
    matrices = []
    for other_row, other_column in product((0, 1), (0, 1)):
        if (other_row, other_column) != (row, column):
            direction = (other_column - column, other_row - row)
            matrices.append(models[_NAME_OF_DIRECTION[direction]])
    # The three matrices are stacked, so that one product predicts all three blocks.
    changes = F.linear(z, torch.cat(matrices)).chunk(3, dim=-1)  # (N, H, W, C) each
    # The identity is added separately, because I + M in bfloat16 would round small M to zero.
    blocks = [z + change for change in changes]
    blocks.insert(corner, z)
    return tile(blocks)


def tile(blocks: Sequence[Tensor]) -> Tensor:
    """Concatenates four blocks (N, H, W, C), in the order of ``CORNERS``, to (N, 2H, 2W, C)."""
    top_left, top_right, bottom_left, bottom_right = blocks
    top = torch.cat([top_left, top_right], dim=2)
    bottom = torch.cat([bottom_left, bottom_right], dim=2)
    return torch.cat([top, bottom], dim=1)


@dataclass(frozen=True)
class VisibleQuarters:
    """Positions of the visible quarters of a batch.

    The counts are Python numbers, which need no synchronization with the GPU. If the batch size is
    a multiple of 8 (4 without "centre"), the counts of all batches are equal. Then compiled graphs
    are reused.

    Attributes:
        order: indices (N,) of the images, sorted by position of the visible quarter.
        counts: number of images for each of ``QUADRANTS``.
    """

    order: Tensor
    counts: tuple[int, ...]

    @classmethod
    def draw(cls, num_images: int, *, visible: str, device: torch.device) -> "VisibleQuarters":
        """Draws the visible quarter of each image with PyTorch's global generators.

        ``visible`` is "corner", "centre" or "both". With "both", half of the images (rounded up or
        down at random) have a visible corner.
        """
        half = (num_images + int(torch.randint(2, (), device="cpu"))) // 2
        num_at_corners = {"corner": num_images, "centre": 0, "both": half}[visible]
        # Corners are equally frequent. Random corners get the remaining images.
        counts = [num_at_corners // 4] * 4
        num_remaining = num_at_corners % 4
        for corner in torch.randperm(4, device="cpu")[:num_remaining].tolist():
            counts[corner] += 1
        order = torch.randperm(num_images, device=device)
        return cls(order, (*counts, num_images - num_at_corners))

    @classmethod
    def at(cls, quadrants: Sequence[str], *, device: torch.device) -> "VisibleQuarters":
        """Takes the position of each image's visible quarter, a name of ``QUADRANTS``."""
        indices = [QUADRANTS.index(quadrant) for quadrant in quadrants]
        order = sorted(range(len(indices)), key=indices.__getitem__)
        counts = tuple(indices.count(index) for index in range(len(QUADRANTS)))
        return cls(torch.tensor(order).to(device, non_blocking=True), counts)

    def crop(self, images: Tensor) -> Tensor:
        """Crops images (N, C, S, S), sorted by ``order``, to quarters (N, C, S / 2, S / 2)."""
        half = images.shape[-1] // 2
        middle = half // 2
        # The first row and column of each of QUADRANTS.
        starts = [(0, 0), (0, half), (half, 0), (half, half), (middle, middle)]
        quarters = []
        for group, (row, column) in zip(images.split(self.counts), starts, strict=True):
            quarters.append(group[..., row : row + half, column : column + half])
        return torch.cat(quarters)

    def spread(self, values: Tensor) -> Tensor:
        """Takes one value per quadrant, (5, ...). Returns one per image, (N, ...), in ``order``."""
        repeated = []
        for value, count in zip(values, self.counts, strict=True):
            repeated.append(value.expand(count, *value.shape))
        return torch.cat(repeated)

    def restore_order(self, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Takes a dict per image, in ``order``. Returns them in the order of the batch.

        To each dict, "place" is added, the name of the visible quarter.
        """
        quadrants: list[str] = []  # of each image, in ``order``
        for quadrant, count in zip(QUADRANTS, self.counts, strict=True):
            quadrants += [quadrant] * count
        results_by_index = {}
        for index, quadrant, result in zip(self.order.tolist(), quadrants, results, strict=True):
            results_by_index[index] = {**result, "place": quadrant}
        return [results_by_index[index] for index in range(len(results))]


def visible_positions(size: int) -> Tensor:
    """Returns masks (5, size, size) for ``QUADRANTS``, True in the visible quarter."""
    index = torch.arange(size)
    first = index < size // 2
    last = ~first
    middle = (index >= size // 4) & (index < size - size // 4)
    rows = torch.stack([first, first, last, last, middle])  # (5, size), in the order of QUADRANTS
    columns = torch.stack([first, last, first, last, middle])
    return rows[:, :, None] & columns[:, None, :]


@META_ARCH_REGISTRY.register()
class QBHeat(ReconstructionModel):
    """Encodes a quarter of the image, predicts the other features linearly, and decodes pixels.

    The features of the whole image have G x G positions, where G is a multiple of 4.
    ``predictor.scales["corner"].matrices()`` and
    ``predictor.scales["centre"].matrices()`` return the QB-Heat paper's A, B and C times Δx.
    """

    predictor: HeatPredictor
    grid_multiple = 4  # so that a visible quarter can be split into quarters

    @configurable
    def __init__(self, *, decoder: ReconstructionDecoder, **others: Any) -> None:
        """Takes the arguments of ``ReconstructionModel``, with a ``HeatPredictor``."""
        super().__init__(decoder=decoder, **others)
        self.views = {kind: QUADRANTS_OF[kind] for kind in self.predictor.scales}
        visible = visible_positions(decoder.grid_size).flatten(1)
        self.register_buffer("visible", visible, persistent=False)
        self.visible: Tensor  # (5, G * G), by quadrant

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.QB_HEAT
        predictor = HeatPredictor(
            dim=node.FEATURE_DIM, num_models=node.NUM_MODELS, visible=node.VISIBLE
        )
        return {**cls.shared_from_config(cfg), "predictor": predictor}

    @classmethod
    def views_from_config(cls, cfg: CfgNode) -> Mapping[str, Sequence[str]]:
        """Returns the kinds of views that the config's model evaluates, each with its quarters."""
        visible = cfg.MODEL.QB_HEAT.VISIBLE
        return {kind: QUADRANTS_OF[kind] for kind in OFFSETS if visible in (kind, "both")}

    def forward(
        self, batched_inputs: list[dict[str, Any]], quadrants: Sequence[str] | None = None
    ) -> Any:
        """
        Args:
            batched_inputs: dicts of a dataset mapper with "image" (3, S, S), and in some test sets
                "place", an element of ``QUADRANTS``.
            quadrants: the visible quarter of each image, an element of ``QUADRANTS``. The default
                is random in training. In evaluation, it is "place", or else each quadrant in turn.

        Returns:
            In training, a dict of losses. In evaluation, a dict per image: "reconstruction"
            (3, S, S), "visible" (S, S), "loss_reconstruction" and "place".
        """
        images = self.preprocess_image(batched_inputs)
        has_places = all("place" in entry for entry in batched_inputs)
        if quadrants is None and has_places and not self.training:
            quadrants = [entry["place"] for entry in batched_inputs]
        quarters = self.choose_quarters(len(images), quadrants)
        images = images[quarters.order]
        z = self.encode(quarters.crop(images))  # (N, G / 2, G / 2, C)
        z = self.predictor(z, quarters.counts)  # (N, G, G, C)
        visible = quarters.spread(self.visible)
        if self.training:
            num_masked = visible.shape[1] * 3 // 4  # all but the visible quarter
            return self.training_losses(z, images, visible, num_masked)
        return quarters.restore_order(self.inference(z, images, visible))

    def choose_quarters(self, num_images: int, quadrants: Sequence[str] | None) -> VisibleQuarters:
        """Returns the visible quarters.

        If ``quadrants`` is None, they are random in training. In evaluation, images have each
        quadrant in turn. Raises a ``ValueError`` if ``quadrants`` are invalid.
        """
        visible = self.predictor.visible
        if quadrants is None and self.training:
            return VisibleQuarters.draw(num_images, visible=visible, device=self.device)
        known = QUADRANTS_OF[visible]
        if quadrants is None:
            quadrants = [known[i % len(known)] for i in range(num_images)]
        if len(quadrants) != num_images or set(quadrants) - set(known):
            raise ValueError(
                f"each of {num_images} images needs a quadrant of {known}, not {list(quadrants)}"
            )
        return VisibleQuarters.at(quadrants, device=self.device)

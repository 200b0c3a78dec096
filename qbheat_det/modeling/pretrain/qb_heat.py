# Copyright (c) qbheat_det contributors. Apache-2.0.
"""QB-Heat: pre-training by predicting the features of an image linearly from a visible quarter.

Paper: "Self-Supervised Learning based on Heat Equation" (QB-Heat), Chen et al., arXiv:2211.13228,
Sec. 3, 4 and Appendix A. Features at a distance Δx are predicted by a finite difference (Eq. 5),
z(x + Δx, y) = (I + Δx A) z(x, y), with one matrix for each of eight directions.

The paper does not state the following details. The learned parameter is the matrix M = Δx A, which
starts at zero. The matrix C_ij predicts diagonally, in the directions of A_i and B_j together. The
four corners are equally frequent in a batch. With Mobile-Former, the objective learns from the
output "s16_expanded", which the paper's classifiers and decoders read. If it learned from an
earlier feature map, the last convolution would keep its random weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.modeling.checks import check_value

from .reconstruction import ReconstructionDecoder, ReconstructionModel

CORNERS = ("top_left", "top_right", "bottom_left", "bottom_right")
QUADRANTS = (*CORNERS, "centre")
"""Positions of the visible quarter. The index of a corner is 2 * row + column."""
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
"""Side of a predicted block, relative to the side of the image, by kind of visible quarter."""
_EXPLICIT = {8: tuple(DIRECTIONS), 4: ("A1", "A2", "B1", "B2"), 2: ("A1", "B1")}


class LinearModels(nn.Module):
    """The matrices (C, C) that predict at one distance Δx: the paper's A, B and C times Δx.

    Explicit matrices are parameters with the paper's names. All others are computed from them.
    """

    def __init__(self, *, dim: int, num_models: int, offset: float) -> None:
        """Takes the width C, the number of explicit matrices (8, 4 or 2), and Δx (``OFFSETS``)."""
        super().__init__()
        known = tuple(_EXPLICIT)
        check_value(num_models in known, "QB_HEAT.NUM_MODELS", num_models, f"one of {known}")
        check_value(dim >= 1, "QB_HEAT.FEATURE_DIM", dim, "at least 1")
        self.offset = offset
        for name in _EXPLICIT[num_models]:
            self.register_parameter(name, nn.Parameter(torch.zeros(dim, dim)))

    def matrices(self) -> dict[str, Tensor]:
        """Returns all eight matrices by name (see ``DIRECTIONS``), with gradients, in float32."""
        models: dict[str, Tensor] = dict(self.named_parameters(recurse=False))
        for name in ("A", "B"):  # Eq. 9
            models.setdefault(f"{name}2", -models[f"{name}1"])
        # Autocast would round the products.
        with torch.autocast(models["A1"].device.type, enabled=False):
            for i, j in product("12", "12"):
                if f"C{i}{j}" not in models:  # Eq. 12
                    a, b = models[f"A{i}"], models[f"B{j}"]
                    models[f"C{i}{j}"] = a + b + (a @ b + b @ a) / 2
        return models


class HeatPredictor(nn.Module):
    """Predicts the features of the whole image from the visible quarter's features.

    A visible corner predicts the three remaining quarters, at an offset of half the image. A
    visible centre is split into quarters. Each of them predicts the three adjacent blocks in its
    corner of the image, at an offset of a quarter of the image.
    """

    def __init__(self, *, dim: int, num_models: int = 8, visible: str = "both") -> None:
        """Takes C and ``num_models`` of ``LinearModels``, and ``MODEL.QB_HEAT.VISIBLE``."""
        super().__init__()
        known = *OFFSETS, "both"
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
        """Takes features (N, H, W, C) of visible quarters. Returns (N, 2H, 2W, C).

        Images are sorted by the position of the visible quarter. ``counts`` are the numbers of
        images for each of ``QUADRANTS``. The visible features are part of the result.
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
            # Each quarter of the centre is the inner corner of a quarter of the image.
            blocks = [block for row in centre.chunk(2, dim=1) for block in row.chunk(2, dim=2)]
            quarters = [extend(block, 3 - i, models) for i, block in enumerate(blocks)]
            images.append(tile(quarters))
        return torch.cat(images)


def extend(z: Tensor, corner: int, models: Mapping[str, Tensor]) -> Tensor:
    """Extends a block (N, H, W, C) in one corner of an area to the whole area (N, 2H, 2W, C).

    ``corner`` is the index of this corner, 2 * row + column. ``models`` are matrices (C, C) by
    name, see ``DIRECTIONS``.
    """
    row, column = divmod(corner, 2)
    others = [block for block in product((0, 1), (0, 1)) if block != (row, column)]
    # The three matrices side by side, so that one product predicts all three blocks.
    weight = torch.cat(
        [models[_NAME_OF_DIRECTION[right - column, down - row]] for down, right in others]
    )
    # The identity is added separately, because I + M in bfloat16 would round small M to zero.
    blocks = [z + change for change in F.linear(z, weight).chunk(3, dim=-1)]
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

    The counts are Python numbers, which need no synchronization with the GPU. They are constant if
    the batch size is a multiple of 8 (4 without "centre"), so that compiled graphs are reused.
    """

    order: Tensor  # (N,), indices of the images, sorted by position of the visible quarter
    counts: tuple[int, ...]  # number of images for each of QUADRANTS

    @classmethod
    def draw(cls, num_images: int, *, visible: str, device: torch.device) -> "VisibleQuarters":
        """Draws the visible quarter of each image with PyTorch's global generators.

        With "both", half of the images (rounded up or down at random) have a visible corner.
        """
        half = (num_images + int(torch.randint(2, (), device="cpu"))) // 2
        at_corners = {"corner": num_images, "centre": 0, "both": half}[visible]
        counts = [at_corners // 4] * 4
        for corner in torch.randperm(4, device="cpu")[: at_corners % 4].tolist():
            counts[corner] += 1
        order = torch.randperm(num_images, device=device)
        return cls(order, (*counts, num_images - at_corners))

    @classmethod
    def at(cls, quadrants: Sequence[str], *, device: torch.device) -> "VisibleQuarters":
        """Takes the visible quarter of each image, a name of ``QUADRANTS``."""
        indices = [QUADRANTS.index(quadrant) for quadrant in quadrants]
        order = sorted(range(len(indices)), key=indices.__getitem__)
        counts = tuple(indices.count(index) for index in range(len(QUADRANTS)))
        return cls(torch.tensor(order).to(device, non_blocking=True), counts)

    def crop(self, images: Tensor) -> Tensor:
        """Crops images (N, C, S, S), sorted by ``order``, to quarters (N, C, S / 2, S / 2)."""
        half = images.shape[-1] // 2
        corners = list(product((0, half), (0, half)))
        firsts = [*corners, (half // 2, half // 2)]  # first row and column of each of QUADRANTS
        quarters = []
        for group, (row, column) in zip(images.split(self.counts), firsts, strict=True):
            quarters.append(group[..., row : row + half, column : column + half])
        return torch.cat(quarters)

    def spread(self, values: Tensor) -> Tensor:
        """Takes one value per quadrant, (5, ...). Returns one per image, (N, ...), in ``order``."""
        pairs = zip(values, self.counts, strict=True)
        return torch.cat([value.expand(count, *value.shape) for value, count in pairs])

    def restore_order(self, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Takes one result per image, in ``order``. Returns them in the order of the batch, each
        with the name of the visible quarter as "place"."""
        counts = zip(QUADRANTS, self.counts, strict=True)
        places = [name for name, count in counts for _ in range(count)]
        ordered: list[dict[str, Any]] = [{}] * len(results)
        for index, place, result in zip(self.order.tolist(), places, results, strict=True):
            ordered[index] = {**result, "place": place}
        return ordered


def visible_positions(size: int) -> Tensor:
    """Returns masks (5, size, size) for ``QUADRANTS``, True in the visible quarter."""
    first = torch.arange(size) < size // 2
    middle = (torch.arange(size) >= size // 4) & (torch.arange(size) < size - size // 4)
    rows = torch.stack([first, first, ~first, ~first, middle])
    columns = torch.stack([first, ~first, first, ~first, middle])
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
        """See ``ReconstructionModel``. ``predictor`` is a ``HeatPredictor``."""
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
        """Returns the ``views`` of the model that a config describes."""
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
            In training, a dict of losses. In evaluation, the results of ``inference`` and "place"
            for each image.
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
            num_masked = visible.shape[1] * 3 // 4
            return self.training_losses(z, images, visible, num_masked)
        return quarters.restore_order(self.inference(z, images, visible))

    def choose_quarters(self, num_images: int, quadrants: Sequence[str] | None) -> VisibleQuarters:
        """Returns the visible quarters. Raises a ``ValueError`` if ``quadrants`` are invalid."""
        known = QUADRANTS_OF[self.predictor.visible]
        if quadrants is None and self.training:
            return VisibleQuarters.draw(
                num_images, visible=self.predictor.visible, device=self.device
            )
        if quadrants is None:
            quadrants = [known[i % len(known)] for i in range(num_images)]
        if len(quadrants) != num_images or set(quadrants) - set(known):
            raise ValueError(
                f"each of {num_images} images needs a quadrant of {known}, not {list(quadrants)}"
            )
        return VisibleQuarters.at(quadrants, device=self.device)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""QB-Heat: pre-training by linear prediction of three quarters of an image from the fourth.

Paper: "Self-Supervised Learning based on Heat Equation" (QB-Heat), Chen et al.,
arXiv:2211.13228, Sec. 3, 4 and Appendix A. Not said there and chosen here: the four corners are
equally frequent within a batch; see the other parts for theirs. With Mobile-Former, the objective
learns from "s16_expanded", which the paper counts as part of the backbone and which its classifiers
and decoders read: from an earlier map, the last convolution would keep random weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY
from torch import Tensor

from .heat_predictor import OFFSETS, HeatPredictor
from .pixel_decoder import ReconstructionDecoder
from .reconstruction import ReconstructionModel

CORNERS = ("top_left", "top_right", "bottom_left", "bottom_right")
QUADRANTS = (*CORNERS, "centre")
"""Positions of the visible quarter; a corner's index is twice its row plus its column."""
QUADRANTS_OF = {"corner": CORNERS, "centre": ("centre",), "both": QUADRANTS}
"""Possible positions for each value of ``MODEL.QB_HEAT.VISIBLE``."""


@dataclass(frozen=True)
class VisibleQuarters:
    """Positions of the visible quarters of a batch, whose images are ordered by position.

    The counts are numbers on the host, so that nothing waits for the device. In batches of a
    multiple of 8 (of 4 without "centre") they are the same in every draw: shapes are static, and
    compiled graphs are reused.
    """

    order: Tensor  # (N,), indices of the images
    counts: tuple[int, ...]  # images at each of QUADRANTS

    @classmethod
    def draw(cls, num_images: int, *, visible: str, device: torch.device) -> "VisibleQuarters":
        """Draws from torch's global generators; with "both", half of the images have corners."""
        half = (num_images + int(torch.randint(2, (), device="cpu"))) // 2
        at_corners = {"corner": num_images, "centre": 0, "both": half}[visible]
        counts = [at_corners // 4] * 4
        for corner in torch.randperm(4, device="cpu")[: at_corners % 4].tolist():
            counts[corner] += 1
        order = torch.randperm(num_images, device=device)
        return cls(order, (*counts, num_images - at_corners))

    @classmethod
    def at(cls, quadrants: Sequence[str], *, device: torch.device) -> "VisibleQuarters":
        """Takes one name of ``QUADRANTS`` for each image, all of which are known."""
        indices = [QUADRANTS.index(quadrant) for quadrant in quadrants]
        order = sorted(range(len(indices)), key=indices.__getitem__)
        counts = tuple(indices.count(index) for index in range(len(QUADRANTS)))
        return cls(torch.tensor(order).to(device, non_blocking=True), counts)

    def crop(self, images: Tensor) -> Tensor:
        """Returns the visible quarters (N, C, S / 2, S / 2) of ordered images (N, C, S, S)."""
        half = images.shape[-1] // 2
        corners = [(i // 2 * half, i % 2 * half) for i in range(4)]
        return torch.cat(
            [
                group[..., top : top + half, left : left + half]
                for group, (top, left) in zip(
                    images.split(self.counts), [*corners, (half // 2, half // 2)], strict=True
                )
            ]
        )

    def spread(self, values: Tensor) -> Tensor:
        """From one value for each of ``QUADRANTS``, (5, ...), to one for each image, (N, ...)."""
        return torch.cat(
            [
                value.expand(count, *value.shape)
                for value, count in zip(values, self.counts, strict=True)
            ]
        )


def visible_positions(size: int) -> Tensor:
    """Returns (5, size, size): for each of ``QUADRANTS``, True in the visible quarter."""
    first = torch.arange(size) < size // 2
    middle = (torch.arange(size) >= size // 4) & (torch.arange(size) < size - size // 4)
    rows = torch.stack([first, first, ~first, ~first, middle])
    columns = torch.stack([first, ~first, first, ~first, middle])
    return rows[:, :, None] & columns[:, None, :]


@META_ARCH_REGISTRY.register()
class QBHeat(ReconstructionModel):
    """An encoder of a quarter of the image, linear predictions of the rest, a decoder to pixels.

    The encoder gets the visible quarter alone. Its map has G x G positions over the image, G a
    multiple of 4. The paper's matrices are ``predictor.scales["corner"].matrices()["A1"]`` and so
    on.
    """

    predictor: HeatPredictor
    grid_multiple = 4  # a quarter falls into quarters

    @configurable
    def __init__(self, *, decoder: ReconstructionDecoder, **others: Any) -> None:
        """As ``ReconstructionModel``; ``predictor`` is a ``HeatPredictor``."""
        super().__init__(decoder=decoder, **others)
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
        """Returns ``views`` of the model of a config."""
        visible = cfg.MODEL.QB_HEAT.VISIBLE
        return {kind: QUADRANTS_OF[kind] for kind in OFFSETS if visible in (kind, "both")}

    @property
    def views(self) -> Mapping[str, Sequence[str]]:
        """The kinds of visible quarters, "corner" and "centre", with their quadrants."""
        return {kind: QUADRANTS_OF[kind] for kind in self.predictor.scales}

    def forward(
        self, batched_inputs: list[dict[str, Any]], quadrants: Sequence[str] | None = None
    ) -> Any:
        """
        Args:
            batched_inputs: dicts of a dataset mapper: "image" (3, S, S) and, in some test sets,
                "place", a name of ``QUADRANTS``.
            quadrants: positions of the visible quarters, a name of ``QUADRANTS`` for each image.
                By default random in training; else "place", or without it each in turn.

        Returns:
            A dict of losses in training; else what ``inference`` returns for each image, with its
            "place".
        """
        images = self.preprocess_image(batched_inputs)
        if quadrants is None and not self.training:
            own = [entry["place"] for entry in batched_inputs if "place" in entry]
            quadrants = own if len(own) == len(images) else None
        quarters = self.choose_quarters(len(images), quadrants)
        images = images[quarters.order]
        z = self.predictor(self.encode(quarters.crop(images)), quarters.counts)
        visible = quarters.spread(self.visible)
        if self.training:
            return self.training_losses(z, images, visible, visible.shape[1] * 3 // 4)
        return self.in_order(quarters, self.inference(z, images, visible))

    def choose_quarters(self, num_images: int, quadrants: Sequence[str] | None) -> VisibleQuarters:
        """Returns the visible quarter of each image; a ``ValueError`` if a quadrant is unknown."""
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

    @staticmethod
    def in_order(quarters: VisibleQuarters, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the results of ``inference``, with "place", in the batch's order."""
        counts = zip(QUADRANTS, quarters.counts, strict=True)
        names = [name for name, count in counts for _ in range(count)]
        by_index = zip(quarters.order.tolist(), names, found, strict=True)
        results = {index: {**result, "place": name} for index, name, result in by_index}
        return [results[index] for index in range(len(found))]

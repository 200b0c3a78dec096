# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Denoising queries: in training, the decoder also reconstructs ground truth with noise added.

Papers: "DN-DETR: Accelerate DETR Training by Introducing Query DeNoising", arXiv:2203.01305, and
for the negatives "DINO: DETR with Improved DeNoising Anchor Boxes", arXiv:2203.03605, Sec. 3.3.

Deviations: MF-DETR's queries are no boxes, so a two-layer network over the sine code of a noised
box gives the query's position, as in DAB-DETR; there is no indicator beside the embedded label,
since the content of MF-DETR's own queries is zero; the number of groups depends on the image's own
boxes, so that an image gives the same alone as beside a crowded one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from qbheat_det.layers import SinePositionEncoding

from .criterion import Matches, SetCriterion, Targets
from .query_set import QuerySet, sum_blocks


@dataclass(frozen=True)
class DenoisingNoise:
    """Random numbers in [0, 1), for E queries of every image.

    ``shift`` (N, E, 4) moves the corners of the boxes, ``relabel`` (N, E) selects labels to
    replace, ``label`` (N, E) their new values.
    """

    shift: Tensor
    relabel: Tensor
    label: Tensor

    @classmethod
    def draw(cls, num_images: int, num_queries: int, device: torch.device) -> "DenoisingNoise":
        """Draws from the device's global generator."""
        drawn = torch.rand(num_images, num_queries, 6, device=device)
        return cls(shift=drawn[..., :4], relabel=drawn[..., 4], label=drawn[..., 5])


@dataclass(frozen=True)
class _Layout:
    """The box, group and kind of each query; fields are (N, E)."""

    target: Tensor
    group: Tensor
    negative: Tensor
    valid: Tensor  # False after an image's last query

    @property
    def width(self) -> int:
        """E."""
        return self.valid.shape[1]

    def to(self, device: torch.device) -> "_Layout":
        """Moves the fields, without waiting for the device."""
        fields = (self.target, self.group, self.negative, self.valid)
        return _Layout(*(field.to(device, non_blocking=True) for field in fields))


class Denoising(nn.Module):
    """Makes denoising queries of a batch's ground truth, and computes their losses."""

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        groups: int,
        box_noise: float = 0.4,
        label_noise: float = 0.25,
        negatives: bool = True,
        max_queries: int = 200,
        weight: float = 1.0,
    ) -> None:
        """
        Args:
            num_classes: K.
            dim: C, width of the decoder's queries.
            groups: noised copies of each box, at most; queries of one copy attend to each other.
            box_noise: largest shift of a corner, relative to half the side of its box, in [0, 2];
                that of a negative is one to two times as large.
            label_noise: probability that a random class replaces a label.
            negatives: whether each copy has a second one, with more noise, that is no object.
            max_queries: of one image, which reduces its groups, and then its boxes.
            weight: factor on the losses.

        Raises:
            ValueError: a number is out of its range.
        """
        super().__init__()
        _check_range("GROUPS", groups, 1)
        _check_range("BOX_NOISE", box_noise, 0, 2)
        _check_range("LABEL_NOISE", label_noise, 0, 1)
        _check_range("MAX_QUERIES", max_queries, 1 + negatives)
        _check_range("WEIGHT", weight, 0)
        self.num_classes = num_classes
        self.groups = groups
        self.box_noise = box_noise
        self.label_noise = label_noise
        self.copies = 1 + negatives
        self.max_queries = max_queries
        self.weight = weight
        self.label_embed = nn.Embedding(num_classes, dim)
        self.position_encoding = SinePositionEncoding(channels=dim)
        layers = nn.Linear(2 * dim, dim), nn.Linear(dim, dim)
        self.box_embed = nn.Sequential(layers[0], nn.ReLU(), layers[1])
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, targets: Targets, noise: DenoisingNoise | None = None) -> QuerySet:
        """
        Args:
            targets: ground truth of the N images.
            noise: random if None.

        Returns:
            The queries, as many for each image as for the one with the most; no query attends to
            those beyond an image's own.
        """
        layout = self._layout(targets.counts).to(targets.boxes.device)
        if noise is None:
            noise = DenoisingNoise.draw(len(targets.counts), layout.width, targets.boxes.device)
        labels = self.noised_labels(targets.labels.gather(1, layout.target), noise)
        boxes = targets.boxes.gather(1, layout.target[..., None].expand(-1, -1, 4))
        boxes = self.noised_boxes(boxes, layout.negative, noise)
        code = self.position_encoding.wave(boxes).flatten(-2)  # (N, E, 2 C)
        other_group = layout.group[:, :, None] != layout.group[:, None]
        return QuerySet(
            content=self.label_embed(labels),
            position=self.box_embed(code),
            masked=other_group | ~layout.valid[:, None],
            reads_own=layout.valid.new_ones(layout.width),
        )

    def noised_labels(self, labels: Tensor, noise: DenoisingNoise) -> Tensor:
        """Returns labels (N, E), some of them replaced."""
        drawn = (noise.label * self.num_classes).long()
        return torch.where(noise.relabel < self.label_noise, drawn, labels)

    def noised_boxes(self, boxes: Tensor, negative: Tensor, noise: DenoisingNoise) -> Tensor:
        """Returns boxes (N, E, 4), cxcywh, with their corners moved within the image.

        Args:
            boxes: (N, E, 4), cxcywh in [0, 1] of the unpadded image.
            negative: (N, E), True where a corner moves further.
            noise: random numbers.
        """
        signed = 2 * noise.shift - 1
        further = torch.where(signed < 0, -1.0, 1.0) * negative[..., None]
        half = boxes[..., 2:].repeat(1, 1, 2) / 2
        corners = box_convert(boxes, "cxcywh", "xyxy") + (signed + further) * half * self.box_noise
        first, second = corners.clamp(0, 1).chunk(2, dim=-1)
        # Strong noise can move a corner past the other one.
        ordered = torch.cat([torch.minimum(first, second), torch.maximum(first, second)], dim=-1)
        return box_convert(ordered, "xyxy", "cxcywh")

    def losses(
        self,
        logits: Tensor,
        boxes: Tensor,
        targets: Targets,
        criterion: SetCriterion,
        normalizers: Tensor,
    ) -> dict[str, Tensor]:
        """Returns "loss_dn_ce", "loss_dn_bbox" and "loss_dn_giou", weighted sums over the L blocks.

        Args are those of ``QueryGroups.losses``, for the queries of the same targets.
        """
        layout = self._layout(targets.counts)
        # Indices come from the counts on the host, so that nothing waits for the device: the
        # queries of all images in one row, without gaps.
        image, query = layout.valid.nonzero(as_tuple=True)
        kept = (~layout.negative[image, query]).nonzero()[:, 0]
        target = image * targets.labels.shape[1] + layout.target[image, query]
        num_blocks = len(logits)
        block = torch.arange(num_blocks).repeat_interleave(len(kept))
        matches = Matches(
            block=block,
            image=torch.zeros_like(block),
            query=kept.repeat(num_blocks),
            target=target[kept].repeat(num_blocks),
        ).to(logits.device)
        image, query = (index.to(logits.device, non_blocking=True) for index in (image, query))
        row = Targets(
            labels=targets.labels.reshape(1, -1),
            boxes=targets.boxes.reshape(1, -1, 4),
            counts=(sum(targets.counts),),
        )
        found = criterion.block_losses(
            logits[:, image, query][:, None],
            boxes[:, image, query][:, None],
            row,
            matches,
            normalizers,
        )
        return sum_blocks(found, kind="dn", weight=self.weight)

    def normalizers(self, counts: Sequence[int], criterion: SetCriterion) -> tuple[float, float]:
        """As ``SetCriterion.normalizers``, of the boxes in each image."""
        kept = sum(groups * used for groups, used in map(self._shape_of, counts))
        return criterion.classification.normalizer(kept, (self.copies - 1) * kept), float(kept)

    def _shape_of(self, count: int) -> tuple[int, int]:
        """Returns an image's number of groups and the number of boxes in each."""
        used = min(count, self.max_queries // self.copies)
        return min(self.groups, self.max_queries // max(self.copies * used, 1)), used

    def _layout(self, counts: Sequence[int]) -> _Layout:
        """Returns the layout of a batch's queries, on the CPU."""
        return _lay_out(tuple(map(self._shape_of, counts)), self.copies)


def _check_range(key: str, value: float, least: float, most: float = math.inf) -> None:
    if not least <= value <= most:
        allowed = f"at least {least}" if most == math.inf else f"in [{least}, {most}]"
        raise ValueError(f"MODEL.MF_DETR.DENOISING.{key} is {value}, but must be {allowed}")


@lru_cache(maxsize=1)  # the losses of a batch use the layout of its queries again
def _lay_out(shapes: tuple[tuple[int, int], ...], copies: int) -> _Layout:
    """Returns the layout of a batch's queries, on the CPU: group by group, negatives last.

    ``shapes`` has the number of groups of each image and of boxes in each; ``copies`` is 2 with
    negatives, else 1.
    """
    groups, used = torch.tensor(shapes).T[..., None]
    length = copies * used  # of a group, (N, 1)
    total = groups * length
    index = torch.arange(int(total.max())).expand(len(shapes), -1)  # (N, E)
    inside = index % length.clamp(min=1)
    return _Layout(
        target=torch.where(index < total, inside % used.clamp(min=1), 0),
        group=index // length.clamp(min=1),
        negative=inside >= used,
        valid=index < total,
    )

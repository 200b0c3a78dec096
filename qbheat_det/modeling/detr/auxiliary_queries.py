# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Denoising queries of MF-DETR's decoder in training, and their losses.

The decoder refines them with the same weights, but neither the object queries nor the feature map
attend to them. They are noised ground truth: "DN-DETR", arXiv:2203.01305; negatives: "DINO",
arXiv:2203.03605, Sec. 3.3.

Deviations: as in DAB-DETR, an MLP over the sine encoding of a noised box gives the query position.
Label embeddings have no indicator. The feature map attends only to the decoder's own queries. The
number of groups depends only on the boxes of the same image, so that an image does not depend on
the rest of its batch.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from qbheat_det.layers import SinePositionEncoding
from qbheat_det.modeling.image_model import check_value

from .criterion import Matches, SetCriterion, Targets
from .mf_decoder import QuerySet

_COPIES = 2  # a positive and a negative query


class _Layout(NamedTuple):
    """The box index, group and kind of each query. All fields are (N, E)."""

    target: Tensor
    group: Tensor
    negative: Tensor
    valid: Tensor  # False for padding after the last query of an image


class Denoising(nn.Module):
    """Denoising queries from the ground truth of a batch, and their losses."""

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        groups: int,
        box_noise: float = 0.4,
        label_noise: float = 0.25,
        max_queries: int = 200,
    ) -> None:
        """
        Args:
            num_classes: K.
            dim: C, width of the decoder's queries.
            groups: maximum number of noised copies of each box. Each group also has a negative
                query, with more noise, for each box. Queries of one group attend to each other.
            box_noise: noise scale in [0, 2]: the largest shift of a corner, relative to half the
                side of its box. Corners of negative queries move 1 to 2 times as far.
            label_noise: probability that a random class replaces a label.
            max_queries: maximum number of queries per image. If it is exceeded, the image has fewer
                groups. If one group still exceeds it, some boxes are left out.

        Raises:
            ValueError: a number is out of range.
        """
        super().__init__()
        ranges = {
            "GROUPS": (groups, 1, math.inf),
            "BOX_NOISE": (box_noise, 0, 2),
            "LABEL_NOISE": (label_noise, 0, 1),
            "MAX_QUERIES": (max_queries, _COPIES, math.inf),
        }
        for key, (value, least, most) in ranges.items():
            is_inside = least <= value <= most
            check_value(is_inside, f"MF_DETR.DENOISING.{key}", value, f"in [{least}, {most}]")
        self.num_classes = num_classes
        self.groups = groups
        self.box_noise = box_noise
        self.label_noise = label_noise
        self.max_queries = max_queries
        self.label_embed = nn.Embedding(num_classes, dim)
        self.position_encoding = SinePositionEncoding(channels=dim)
        layers = nn.Linear(2 * dim, dim), nn.Linear(dim, dim)
        self.box_embed = nn.Sequential(layers[0], nn.ReLU(), layers[1])
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, targets: Targets, noise: Tensor | None = None) -> QuerySet:
        """Returns E queries per image. Images with fewer queries are padded with masked ones.

        ``noise`` (N, E, 6) in [0, 1) is random by default. The first four numbers shift the corners
        of a box, the fifth decides if the label is replaced, and the sixth selects the new label.
        """
        device = targets.boxes.device
        layout = _Layout(*(field.to(device, non_blocking=True) for field in self._layout(targets)))
        if noise is None:
            noise = torch.rand(*layout.valid.shape, 6, device=device)
        labels = targets.labels.gather(1, layout.target)
        drawn = (noise[..., 5] * self.num_classes).long()
        labels = torch.where(noise[..., 4] < self.label_noise, drawn, labels)
        boxes = targets.boxes.gather(1, layout.target[..., None].expand(-1, -1, 4))
        boxes = self.noised_boxes(boxes, layout.negative, noise[..., :4])
        code = self.position_encoding.wave(boxes).flatten(-2)  # (N, E, 2 C)
        other_group = layout.group[:, :, None] != layout.group[:, None]
        return QuerySet(
            content=self.label_embed(labels),
            position=self.box_embed(code),
            masked=other_group | ~layout.valid[:, None],
        )

    def noised_boxes(self, boxes: Tensor, negative: Tensor, shift: Tensor) -> Tensor:
        """Moves the corners of boxes (N, E, 4), cxcywh in [0, 1], within the image.

        ``negative`` (N, E) marks negative queries, whose corners move by 1 to 2 times the noise
        scale instead of 0 to 1. ``shift`` (N, E, 4) holds random numbers in [0, 1).
        """
        signed = 2 * shift - 1
        further = torch.where(signed < 0, -1.0, 1.0) * negative[..., None]
        half = boxes[..., 2:].repeat(1, 1, 2) / 2
        corners = box_convert(boxes, "cxcywh", "xyxy") + (signed + further) * half * self.box_noise
        first, second = corners.clamp(0, 1).chunk(2, dim=-1)
        # Strong noise can move a corner beyond the opposite one.
        ordered = torch.cat([torch.minimum(first, second), torch.maximum(first, second)], dim=-1)
        return box_convert(ordered, "xyxy", "cxcywh")

    def losses(
        self,
        outputs: dict[str, Tensor],
        targets: Targets,
        criterion: SetCriterion,
        normalizers: Tensor,
    ) -> dict[str, Tensor]:
        """Returns weighted losses by name, such as "loss_dn_ce", summed over the blocks.

        ``outputs`` are "pred_logits" (L, N, E, K + 1) and "pred_boxes" (L, N, E, 4), cxcywh in
        [0, 1] of the unpadded image, for the queries from ``forward``. ``normalizers`` (2,) are the
        divisors of the class and box losses.
        """
        logits, boxes = outputs["pred_logits"].float(), outputs["pred_boxes"].float()
        layout, device = self._layout(targets), logits.device
        # Concatenates the valid queries of all images. The indices are computed on the CPU from the
        # numbers of boxes, which needs no synchronization with the GPU.
        image, query = layout.valid.nonzero(as_tuple=True)
        kept = (~layout.negative[image, query]).nonzero()[:, 0]
        target = image * targets.labels.shape[1] + layout.target[image, query]
        num_blocks = len(logits)
        block = torch.arange(num_blocks).repeat_interleave(len(kept))
        matched = Matches(
            block=block,
            image=torch.zeros_like(block),
            query=kept.repeat(num_blocks),
            target=target[kept].repeat(num_blocks),
        )
        image, query = (index.to(device, non_blocking=True) for index in (image, query))
        row = Targets(
            labels=targets.labels.reshape(1, -1),
            boxes=targets.boxes.reshape(1, -1, 4),
            counts=(sum(targets.counts),),
        )
        losses = criterion.block_losses(
            logits[:, image, query][:, None],
            boxes[:, image, query][:, None],
            row,
            normalizers,
            Matches(*(index.to(device, non_blocking=True) for index in matched)),
        )
        return {name.replace("loss_", "loss_dn_"): loss.sum() for name, loss in losses.items()}

    def normalizers(self, counts: Sequence[int], criterion: SetCriterion) -> tuple[float, float]:
        """See ``SetCriterion.normalizers``. ``counts`` are the numbers of boxes per image."""
        kept = sum(groups * used for groups, used in map(self._shape_of, counts))
        return criterion.classification.normalizer(kept, (_COPIES - 1) * kept), float(kept)

    def _shape_of(self, count: int) -> tuple[int, int]:
        """Takes the number of boxes of an image. Returns its (groups, boxes per group)."""
        used = min(count, self.max_queries // _COPIES)
        return min(self.groups, self.max_queries // max(_COPIES * used, 1)), used

    def _layout(self, targets: Targets) -> _Layout:
        """Returns the layout of the queries of a batch, on the CPU."""
        shapes = torch.tensor([self._shape_of(count) for count in targets.counts])  # (N, 2)
        groups, used = shapes.T[..., None]
        length = _COPIES * used  # queries per group, (N, 1)
        total = groups * length
        index = torch.arange(int(total.max())).expand(len(shapes), -1)  # (N, E)
        inside = index % length.clamp(min=1)
        return _Layout(
            target=torch.where(index < total, inside % used.clamp(min=1), 0),
            group=index // length.clamp(min=1),
            negative=inside >= used,
            valid=index < total,
        )

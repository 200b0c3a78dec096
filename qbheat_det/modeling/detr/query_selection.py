# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Selects the feature-map positions with the highest scores of a dense head as object queries.

The selection is intended for training on a few hundred images. It follows the two-stage queries of
"Deformable DETR", arXiv:2010.04159, Sec. 4.2. The decoder refines the boxes and classes of the
selected positions. A position is distinct if none of its eight neighbors has a higher score. Other
positions are selected only if there are too few distinct ones, similar to "Dense Distinct Query",
arXiv:2303.12776. The dense head is trained one-to-many: ATSS (arXiv:1912.02424) assigns each box to
several positions.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from detectron2.structures import Boxes
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import box_convert

from qbheat_det.layers import SinePositionEncoding, depthwise, pointwise, zero_padding
from qbheat_det.layers.padded_maps import valid_sizes
from qbheat_det.modeling.atss import AtssAssigner

from .criterion import Matches, SetCriterion, Targets

_BASE_SIZE = 4  # side of the anchor of a position, in strides of its level
_FINEST_STRIDE = 8  # stride of the last level, in pixels
_MAX_LOG_SCALE = 4.0  # upper bound of the logarithm of the factor by which a box grows
_NEVER = -1e4  # logit of positions outside the image, which are never selected
_FAR = 1e6  # pixels; anchors outside the image are moved so far that no box is assigned to them
# The losses of the dense head are divided by this number, because several positions learn from one
# box. ATSS assigns 4.3 positions to a box of the aquarium set.
_DIVISOR = 6


class Proposals(NamedTuple):
    """Predictions of the dense head at the P positions of all levels, or of one level."""

    logits: Tensor  # (N, P, K + 1)
    boxes: Tensor  # (N, P, 4), cxcywh in [0, 1] of the unpadded image
    anchors: Tensor  # (N, P, 4), cxcywh in [0, 1] of the unpadded image
    features: Tensor  # (N, P, C)
    distinct: Tensor  # (N, P), True inside the image if no neighbor has a higher score
    num_positions: tuple[int, ...]  # of each level; their sum is P


class SelectedQueries(NamedTuple):
    """Q queries, and the predictions that the decoder refines."""

    content: Tensor  # (N, Q, C)
    position: Tensor  # (N, Q, C)
    logits: Tensor  # (N, Q, K + 1)
    boxes: Tensor  # (N, Q, 4)


def refine_boxes(boxes: Tensor, deltas: Tensor) -> Tensor:
    """Applies deltas (…, 4) to boxes (…, 4), cxcywh, as in Faster R-CNN's box regression.

    Deltas are the shift of the center, relative to the size, and the logarithm of the scale.
    """
    centers, sizes = boxes.chunk(2, dim=-1)  # (…, 2) each
    shifts, log_scales = deltas.chunk(2, dim=-1)
    scales = log_scales.clamp(max=_MAX_LOG_SCALE).exp()
    return torch.cat([centers + shifts * sizes, sizes * scales], dim=-1)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Takes rows (N, P, D) and indices (N, Q). Returns the rows (N, Q, D) at these indices."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


class QuerySelection(nn.Module):
    """A dense head on the feature maps of all levels, which selects positions as queries."""

    def __init__(
        self,
        *,
        num_classes: int,
        num_queries: int,
        dim: int,
        assigner: AtssAssigner | None = None,
    ) -> None:
        """
        Args:
            num_classes: K, without the no-object class.
            num_queries: Q, the number of positions to select.
            dim: C, the width of feature maps and queries.
            assigner: assigns the anchors of the positions to boxes in training.
        """
        super().__init__()
        self.num_queries = num_queries
        self.assigner = assigner or AtssAssigner()
        self.tower = nn.ModuleList(
            nn.ModuleList([depthwise(dim, dim, ""), pointwise(dim, dim, ""), nn.LayerNorm(dim)])
            for _ in range(2)
        )
        self.class_embed = nn.Linear(dim, num_classes + 1)
        self.bbox_embed = nn.Linear(dim, 4)
        self.content = nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim))
        self.position_encoding = SinePositionEncoding(channels=dim)
        self.box_embed = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def reset_parameters(self) -> None:
        """Initializes small weights, so that initial predictions of all positions are similar."""
        for layer in (self.class_embed, self.bbox_embed):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)

    def propose(self, levels: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Proposals:
        """Returns the predictions at the positions of all levels.

        Takes the feature map (N, C, H, W) and the padding mask (N, 1, H, W) of each level.
        """
        parts = [self.propose_level(x, mask) for x, mask in zip(levels, masks, strict=True)]
        return Proposals(
            logits=torch.cat([part.logits for part in parts], dim=1),
            boxes=torch.cat([part.boxes for part in parts], dim=1),
            anchors=torch.cat([part.anchors for part in parts], dim=1),
            features=torch.cat([part.features for part in parts], dim=1),
            distinct=torch.cat([part.distinct for part in parts], dim=1),
            num_positions=tuple(part.logits.shape[1] for part in parts),
        )

    def select(self, proposals: Proposals) -> SelectedQueries:
        """Returns Q proposals as queries: distinct ones first, by descending score."""
        # Q empty proposals are appended, in case the feature maps have fewer than Q positions.
        empty_rows = (0, 0, 0, self.num_queries)
        logits = F.pad(proposals.logits, empty_rows, value=_NEVER)
        boxes = F.pad(proposals.boxes, empty_rows, value=0.5)
        features = F.pad(proposals.features, empty_rows, value=0.0)
        distinct = F.pad(proposals.distinct, (0, self.num_queries))

        # The last logit is not a class.
        scores = logits[..., :-1].amax(dim=-1)  # (N, P + Q)
        scores = torch.where(distinct, scores, scores + _NEVER)
        index = scores.topk(self.num_queries, dim=1).indices
        logits = gather_rows(logits, index).detach()
        boxes = gather_rows(boxes, index).detach()
        features = gather_rows(features, index)

        box_code = self.position_encoding.wave(boxes.clamp(0, 1)).flatten(-2)  # (N, Q, 2 C)
        return SelectedQueries(
            content=self.content(features),
            position=self.box_embed(box_code),
            logits=logits,
            boxes=boxes,
        )

    def losses(
        self, proposals: Proposals, targets: Targets, criterion: SetCriterion, normalizers: Tensor
    ) -> dict[str, Tensor]:
        """Returns the weighted losses of the dense head, such as "loss_proposal_ce".

        ``normalizers`` (2,) are the divisors of the decoder's losses.
        """
        # The criterion expects predictions of L decoder blocks. Here, L is 1.
        logits = proposals.logits.float()[None]
        boxes = proposals.boxes.float()[None]
        matches = self.assign(proposals, targets)
        losses = criterion.block_losses(logits, boxes, targets, normalizers * _DIVISOR, matches)
        return {
            name.replace("loss_", "loss_proposal_"): loss.sum() for name, loss in losses.items()
        }

    @torch.no_grad()
    def assign(self, proposals: Proposals, targets: Targets) -> Matches:
        """Assigns each box to several positions. Positions outside the images have no box."""
        # The assigner expects pixels. The size of a pixel, relative to the image, is computed from
        # the last position's anchor, which is on the finest level.
        finest_anchor = proposals.anchors[:, -1:, 2:]  # (N, 1, 2), width and height
        pixel_size = finest_anchor.repeat(1, 1, 2) / (_BASE_SIZE * _FINEST_STRIDE)  # (N, 1, 4)
        anchors = box_convert(proposals.anchors / pixel_size, "cxcywh", "xyxy")  # (N, P, 4)
        is_outside = proposals.logits[..., :1] <= _NEVER / 2  # (N, P, 1)
        anchors = torch.where(is_outside, -_FAR, anchors)
        boxes = box_convert(targets.boxes / pixel_size, "cxcywh", "xyxy")  # (N, T, 4)
        image_rows = []
        for index, num_boxes in enumerate(targets.counts):
            levels = [Boxes(level) for level in anchors[index].split(proposals.num_positions)]
            image_rows.append(self.assigner(levels, Boxes(boxes[index, :num_boxes])))
        assigned = torch.stack(image_rows)  # (N, P), the index of a box, or -1
        image, query = (assigned >= 0).nonzero(as_tuple=True)
        target = assigned[image, query]
        return Matches(block=torch.zeros_like(query), image=image, query=query, target=target)

    def propose_level(self, x: Tensor, padding: Tensor | None) -> Proposals:
        """Returns the P = H * W proposals of one level.

        Takes a feature map (N, C, H, W) and its padding mask (N, 1, H, W), or None.
        """
        for depthwise_conv, pointwise_conv, norm in cast(Sequence[Sequence[nn.Module]], self.tower):
            x = pointwise_conv(depthwise_conv(zero_padding(x, padding)))
            x = F.relu(norm(x.permute(0, 2, 3, 1)))  # (N, H, W, C), as LayerNorm expects
            x = x.permute(0, 3, 1, 2)
        features = x.flatten(2).transpose(1, 2)  # (N, P, C)
        logits = self.class_embed(features).float()
        height, width = x.shape[-2:]
        anchors = make_anchors((height, width), padding, logits)
        boxes = refine_boxes(anchors, self.bbox_embed(features).float())
        if padding is not None:  # positions outside the image become empty proposals
            outside = padding.flatten(1)[..., None]  # (N, P, 1)
            logits = logits.masked_fill(outside, _NEVER)
            boxes = boxes.masked_fill(outside, 0.5)
            features = features.masked_fill(outside, 0.0)
        scores = logits[..., :-1].amax(dim=-1).detach()  # (N, P)
        # The highest score of each position and its eight neighbors.
        score_map = scores.view(-1, 1, height, width)
        highest = F.max_pool2d(score_map, kernel_size=3, stride=1, padding=1)
        distinct = scores >= highest.flatten(1)
        if padding is not None:
            distinct = distinct & ~padding.flatten(1)
        return Proposals(
            logits=logits,
            boxes=boxes,
            anchors=anchors,
            features=features,
            distinct=distinct,
            num_positions=(height * width,),
        )


def make_anchors(size: tuple[int, int], padding: Tensor | None, like: Tensor) -> Tensor:
    """Returns a square anchor per position, (N, P, 4), cxcywh in [0, 1] of the unpadded image.

    The sides of an anchor are ``_BASE_SIZE`` times the stride, and at most 1. ``size`` is (H, W) of
    the feature map, and ``padding`` (N, 1, H, W) its padding mask. ``like`` is a tensor (N, …) with
    the device and dtype of the anchors.
    """
    height, width = size
    if padding is None:
        # The exporter does not support new_tensor, and len() would fix the batch size.
        heights = like.new_full((like.shape[0], 1), height)
        widths = like.new_full((like.shape[0], 1), width)
        extent = torch.cat([heights, widths], dim=1)
    else:
        extent = valid_sizes(padding).to(like.dtype)
    # extent (N, 2) is the height and width of the unpadded image, in positions of the feature map.
    rows = torch.arange(height, device=like.device, dtype=like.dtype) + 0.5
    columns = torch.arange(width, device=like.device, dtype=like.dtype) + 0.5
    x = (columns / extent[:, 1:])[:, None].expand(-1, height, -1)  # (N, H, W)
    y = (rows / extent[:, :1])[:, :, None].expand(-1, -1, width)  # (N, H, W)
    centers = torch.stack([x, y], dim=-1).flatten(1, 2)  # (N, P, 2)
    sizes = (_BASE_SIZE / extent.flip(1))[:, None].expand_as(centers)  # (N, P, 2)
    return torch.cat([centers, sizes.clamp(max=1)], dim=-1)

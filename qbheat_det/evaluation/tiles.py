# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Merges the boxes of an image with those of its tiles, for prediction and evaluation."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from detectron2.evaluation import DatasetEvaluator
from detectron2.layers import batched_nms
from detectron2.structures import Boxes, Instances, pairwise_ioa
from detectron2.utils import comm
from torch import Tensor

from qbheat_det.modeling.contracts import TILE

_MAX_SIDE = 0.5  # of the tile's longer side; larger boxes come from the whole image
_EDGE = 2  # pixels; a box this close to the edge of a tile counts as cut
_NMS_IOU = 0.5
_COVERED = 0.5  # a cut box is dropped if a whole box of its class covers this share

Found = tuple[Any, tuple[int, int, int, int] | None, Instances]
"""Id of the image, tile (x, y, width, height) or None for the whole image, and its boxes."""


def merge_tiles(
    whole: Instances, tiles: Iterable[tuple[tuple[int, int, int, int], Instances]]
) -> Instances:
    """Merges the boxes of a whole image with those of its tiles.

    Boxes longer than half of their tile are dropped: they are often parts of objects that the model
    finds in the whole image.

    Args:
        whole: boxes in the whole image, on the CPU.
        tiles: rectangles (x, y, width, height) in pixels of the image, and the boxes in them.
    """
    found, is_cut = [whole], [torch.zeros(len(whole), dtype=torch.bool)]
    height, width = whole.image_size
    for (x, y, tile_width, tile_height), every in tiles:
        sides = every.pred_boxes.tensor[:, 2:] - every.pred_boxes.tensor[:, :2]
        instances = every[sides.amax(dim=1) <= _MAX_SIDE * max(tile_width, tile_height)]
        boxes = instances.pred_boxes.tensor + torch.tensor([x, y, x, y])
        tile = (x, y, x + tile_width, y + tile_height)
        is_cut.append(_touches_inner_edge(boxes, tile, (height, width)))
        moved = Instances((height, width), **instances.get_fields())
        moved.pred_boxes = Boxes(boxes)
        found.append(moved)
    if len(found) == 1:
        return whole
    return _drop_parts(Instances.cat(found), torch.cat(is_cut))


def _touches_inner_edge(
    boxes: Tensor, tile: tuple[int, int, int, int], size: tuple[int, int]
) -> Tensor:
    """Returns a mask (N,) of the boxes (N, 4) that touch an edge of a tile inside the image."""
    start, end = boxes[:, :2], boxes[:, 2:]
    first, last = torch.tensor(tile).split(2)
    limit = torch.tensor(size[::-1])
    is_cut = (start < first + _EDGE) & (first > 0) | (end > last - _EDGE) & (last < limit)
    return is_cut.any(dim=1)


def _drop_parts(found: Instances, is_cut: Tensor) -> Instances:
    """Drops cut boxes that a whole box of the same class covers, and applies NMS to the rest."""
    whole, cut = found[~is_cut], found[is_cut]
    covered = pairwise_ioa(whole.pred_boxes, cut.pred_boxes) > _COVERED  # (whole, cut)
    covered &= whole.pred_classes[:, None] == cut.pred_classes
    # A whole box does not remove a cut box with more than twice its score.
    covered &= whole.scores[:, None] >= 0.5 * cut.scores
    left = Instances.cat([whole, cut[~covered.any(dim=0)]])
    return left[batched_nms(left.pred_boxes.tensor, left.scores, left.pred_classes, _NMS_IOU)]


def merge_images(found: Iterable[Found]) -> Iterator[tuple[Any, Instances]]:
    """Yields the id and the merged boxes of each image, which precedes its tiles in ``found``."""
    for image_id, group in itertools.groupby(found, key=lambda one: one[0]):
        (_, _, whole), *tiles = group
        yield image_id, merge_tiles(whole, [(tile, boxes) for _, tile, boxes in tiles if tile])


class TiledEvaluator(DatasetEvaluator):
    """Merges predictions on images and their tiles before another evaluator gets them."""

    def __init__(self, evaluator: DatasetEvaluator) -> None:
        """``evaluator`` evaluates boxes in whole images."""
        self._evaluator = evaluator
        self._found: list[Found] = []

    def reset(self) -> None:
        """Removes all images."""
        self._evaluator.reset()
        self._found = []

    def process(self, inputs: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]]) -> None:
        """Adds predictions on images or tiles."""
        for entry, output in zip(inputs, outputs, strict=True):
            boxes = output["instances"].to("cpu")
            self._found.append((entry["image_id"], entry.get(TILE), boxes))

    def evaluate(self) -> Any:
        """Merges the predictions of all processes. Returns results on the main process."""
        # The tiles of an image may be on two processes.
        gathered = itertools.chain.from_iterable(comm.gather(self._found, dst=0))
        for image_id, boxes in merge_images(gathered):
            self._evaluator.process([{"image_id": image_id}], [{"instances": boxes}])
        return self._evaluator.evaluate()

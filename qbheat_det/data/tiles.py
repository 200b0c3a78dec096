# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Overlapping square tiles of large images, in training, evaluation and prediction.

Detection of small objects needs the pixels of a large image at full resolution, so its tiles are
used in addition to the resized whole image. The record of a tile is the record of its image with
the key ``TILE``. ``TileMapper`` crops the tile out of the decoded image. ``merge_tiles`` joins the
boxes that a model detects in the whole image and in its tiles.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from detectron2.evaluation import DatasetEvaluator
from detectron2.layers import batched_nms
from detectron2.structures import Boxes, BoxMode, Instances, pairwise_ioa
from detectron2.utils import comm
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import TILE

OVERLAP = 0.2  # smallest overlap of adjacent tiles, as a share of the tile's side
MIN_VISIBLE = 0.5  # a ground truth box is kept in tiles with at least this share of its area
EMPTY_SHARE = 0.25  # largest number of tiles without boxes, relative to the tiles with boxes
SMALLEST = 32  # smallest side of a tile, in pixels
_MAX_SIDE = 0.5  # detections with a longer side, relative to the tile's longer side, are dropped
_EDGE = 2  # a box that is less than this from the edge of its tile counts as cut; in pixels
_NMS_IOU = 0.5
_COVERED = 0.5  # a cut box is dropped if an uncut box of its class covers more than this share

Rectangle = tuple[int, int, int, int]
"""(x, y, width, height) in pixels of the upright image."""
Prediction = tuple[Any, Rectangle | None, Instances]
"""Id of the image, the tile or None for the whole image, and the detections in it."""


def check_tile(tile: object) -> None:
    """Raises a ``UserError`` unless ``tile`` is 0 (no tiles) or an integer of at least 32."""
    if type(tile) is not int or (tile != 0 and tile < SMALLEST):
        raise UserError(f"tile (INPUT.TILE) is {tile!r}, expected 0 or an integer >= {SMALLEST}")


def tile_starts(size: int, tile: int) -> list[int]:
    """Returns the first pixel of each tile along one axis of an image.

    The tiles are evenly spaced, cover the axis, and overlap by at least the share ``OVERLAP``.

    Args:
        size: length of the axis in pixels.
        tile: side of a tile in pixels.
    """
    if size <= tile:
        return [0]
    overlap = OVERLAP * tile
    # Each tile adds tile - overlap new pixels to the overlap with the tile before.
    number = math.ceil((size - overlap) / (tile - overlap))
    last_start = size - tile
    return [round(index * last_start / (number - 1)) for index in range(number)]


def list_tiles(height: int, width: int, tile: int) -> list[Rectangle]:
    """Returns the tiles of an image, row by row, or [] if the whole image fits into one tile.

    ``tile`` is the side of a tile in pixels.
    """
    corners = list(itertools.product(tile_starts(height, tile), tile_starts(width, tile)))
    if len(corners) == 1:
        return []
    return [(x, y, min(tile, width), min(tile, height)) for y, x in corners]


def cut_records(
    records: Sequence[dict[str, Any]], tile: int, *, is_train: bool
) -> list[dict[str, Any]]:
    """Returns the record of each image, followed by the records of its tiles.

    A box belongs to a tile if at least the share ``MIN_VISIBLE`` of its area is inside the tile.
    The mapper clips it to the tile. In training, most tiles without boxes are dropped: at most
    ``EMPTY_SHARE`` times the number of tiles with boxes are kept. Evaluation keeps all tiles.

    Args:
        records: records of images in Detectron2's format.
        tile: side of a tile in pixels; 0 for no tiles.
        is_train: whether the records are for training.

    Raises:
        UserError: an image has no "width" and "height", or no training image is larger than a tile.
    """
    if not tile:
        return list(records)
    cut: list[dict[str, Any]] = []
    for record in records:
        if "width" not in record or "height" not in record:
            raise UserError(f"INPUT.TILE needs width and height of '{record['file_name']}'")
        cut.append(record)
        for rectangle in list_tiles(record["height"], record["width"], tile):
            boxes = [a for a in record.get("annotations", ()) if _is_visible(a, rectangle)]
            cut.append({**record, "annotations": boxes, TILE: rectangle})
    if not is_train:
        return cut
    if not any(TILE in record for record in cut):
        raise UserError(
            f"no training image is larger than INPUT.TILE {tile}: choose a smaller --tile, or "
            "--tile 0 to train on whole images"
        )
    return _thin_out(cut)


def _is_visible(annotation: dict[str, Any], rectangle: Rectangle) -> bool:
    """Returns whether a rectangle contains at least ``MIN_VISIBLE`` of an annotation's box."""
    left, top, right, bottom = BoxMode.convert(
        list(annotation["bbox"]), annotation["bbox_mode"], BoxMode.XYXY_ABS
    )
    x, y, width, height = rectangle
    inside_x = min(right, x + width) - max(left, x)
    inside_y = min(bottom, y + height) - max(top, y)
    if inside_x <= 0 or inside_y <= 0:
        return False
    return inside_x * inside_y >= MIN_VISIBLE * (right - left) * (bottom - top)


def _thin_out(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drops tiles without boxes until ``EMPTY_SHARE`` is reached. Those kept are evenly spaced."""
    tiles = [record for record in records if TILE in record]
    num_empty = sum(not record["annotations"] for record in tiles)
    num_with_boxes = len(tiles) - num_empty
    num_kept = min(num_empty, int(EMPTY_SHARE * num_with_boxes))
    kept = []
    num_seen = 0  # empty tiles before this record
    for record in records:
        is_empty_tile = TILE in record and not record["annotations"]
        if not is_empty_tile:
            kept.append(record)
            continue
        # Of the first n empty tiles, n * num_kept / num_empty are kept, rounded down.
        kept_before = num_seen * num_kept // num_empty
        num_seen += 1
        kept_after = num_seen * num_kept // num_empty
        if kept_after > kept_before:
            kept.append(record)
    return kept


def merge_tiles(whole: Instances, tiles: Iterable[tuple[Rectangle, Instances]]) -> Instances:
    """Merges the detections in a whole image with the detections in its tiles.

    A detection in a tile is dropped if its longer side exceeds half of the tile's longer side: it
    is often a part of an object that the model detects in the whole image.

    Args:
        whole: detections in the whole image, on the CPU.
        tiles: each tile (x, y, width, height) in pixels of the image, and the detections in it,
            with boxes in pixels of the tile.

    Returns:
        The merged detections, with boxes in pixels of the whole image.
    """
    image_size = whole.image_size
    detections = [whole]
    is_cut = [torch.zeros(len(whole), dtype=torch.bool)]  # whether a tile cuts the object: (N,)
    for (x, y, width, height), in_tile in tiles:
        boxes_in_tile = in_tile.pred_boxes.tensor  # (N, 4), XYXY
        sides = boxes_in_tile[:, 2:] - boxes_in_tile[:, :2]
        is_small = sides.amax(dim=1) <= _MAX_SIDE * max(width, height)
        small = in_tile[is_small]
        boxes = small.pred_boxes.tensor + torch.tensor([x, y, x, y])
        moved = Instances(image_size, **small.get_fields())
        moved.pred_boxes = Boxes(boxes)
        detections.append(moved)
        is_cut.append(_touches_inner_edge(boxes, (x, y, x + width, y + height), image_size))
    if len(detections) == 1:
        return whole
    return _drop_parts(Instances.cat(detections), torch.cat(is_cut))


def _touches_inner_edge(
    boxes: Tensor, tile: tuple[int, int, int, int], image_size: tuple[int, int]
) -> Tensor:
    """Returns which boxes touch an edge of their tile that is inside the image.

    The objects of these boxes probably reach beyond the tile.

    Args:
        boxes: (N, 4), XYXY in pixels of the image.
        tile: XYXY in pixels of the image.
        image_size: (height, width).

    Returns:
        Booleans (N,).
    """
    height, width = image_size
    left, top, right, bottom = boxes.unbind(dim=1)
    tile_left, tile_top, tile_right, tile_bottom = tile
    touches = torch.zeros(len(boxes), dtype=torch.bool)
    if tile_left > 0:
        touches |= left < tile_left + _EDGE
    if tile_top > 0:
        touches |= top < tile_top + _EDGE
    if tile_right < width:
        touches |= right > tile_right - _EDGE
    if tile_bottom < height:
        touches |= bottom > tile_bottom - _EDGE
    return touches


def _drop_parts(detections: Instances, is_cut: Tensor) -> Instances:
    """Drops cut boxes that an uncut box of the same class covers, and applies NMS to the rest.

    ``is_cut`` (N,) tells which boxes are cut by an edge of their tile.
    """
    uncut = detections[~is_cut]  # U boxes
    cut = detections[is_cut]  # C boxes
    is_covered = pairwise_ioa(uncut.pred_boxes, cut.pred_boxes) > _COVERED  # (U, C)
    is_covered &= uncut.pred_classes[:, None] == cut.pred_classes
    # An uncut box does not remove a cut box with more than twice its score.
    is_covered &= uncut.scores[:, None] >= 0.5 * cut.scores
    kept = Instances.cat([uncut, cut[~is_covered.any(dim=0)]])
    return kept[batched_nms(kept.pred_boxes.tensor, kept.scores, kept.pred_classes, _NMS_IOU)]


def merge_images(predictions: Iterable[Prediction]) -> Iterator[tuple[Any, Instances]]:
    """Yields the id and the merged detections of each image.

    In ``predictions``, the detections in the tiles of an image directly follow those in the image.
    """
    for image_id, (first, *others) in _group_by_image(predictions):
        _, _, whole = first
        tiles = [(tile, boxes) for _, tile, boxes in others if tile]
        yield image_id, merge_tiles(whole, tiles)


def _group_by_image(
    predictions: Iterable[Prediction],
) -> Iterator[tuple[Any, list[Prediction]]]:
    """Yields the id of each image, and the adjacent predictions for this id."""
    for image_id, group in itertools.groupby(predictions, key=lambda prediction: prediction[0]):
        yield image_id, list(group)


class TiledEvaluator(DatasetEvaluator):
    """Merges predictions on images and their tiles before another evaluator gets them."""

    def __init__(self, evaluator: DatasetEvaluator, tile: int) -> None:
        """
        Args:
            evaluator: evaluates detections in whole images.
            tile: side of the tiles in pixels.

        An image is not evaluated if one of its tiles could not be read.
        """
        self._evaluator = evaluator
        self._tile = tile
        self._predictions: list[Prediction] = []

    def reset(self) -> None:
        self._evaluator.reset()
        self._predictions = []

    def process(self, inputs: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]]) -> None:
        for entry, output in zip(inputs, outputs, strict=True):
            boxes = output["instances"].to("cpu")
            self._predictions.append((entry["image_id"], entry.get(TILE), boxes))

    def evaluate(self) -> Any:
        """Merges the predictions of all processes. Returns results on the main process."""
        # The tiles of an image may be on two processes.
        gathered = itertools.chain.from_iterable(comm.gather(self._predictions, dst=0))
        complete: list[Prediction] = []
        for _, group in _group_by_image(gathered):
            if self._is_complete(group):
                complete += group
        for image_id, boxes in merge_images(complete):
            self._evaluator.process([{"image_id": image_id}], [{"instances": boxes}])
        return self._evaluator.evaluate()

    def _is_complete(self, predictions: Sequence[Prediction]) -> bool:
        """Returns whether these are the predictions for a whole image and all of its tiles."""
        _, tile, boxes = predictions[0]
        height, width = boxes.image_size
        return tile is None and len(predictions) == 1 + len(list_tiles(height, width, self._tile))

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Overlapping square tiles of large images, in training, evaluation and prediction.

A tile is a record of a data set: the record of its image with the key ``TILE``. Mappers crop the
tile out of the decoded image, see ``TileMapper`` in ``data/mappers``.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from detectron2.structures import BoxMode

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import TILE

OVERLAP = 0.2  # smallest overlap of adjacent tiles, as a share of the tile's side
MIN_VISIBLE = 0.5  # a cut box is kept in a tile that contains at least this share of its area
EMPTY_SHARE = 0.25  # largest number of tiles without boxes, relative to the tiles with boxes
SMALLEST = 32  # pixels

Rectangle = tuple[int, int, int, int]
"""(x, y, width, height) in pixels of the upright image."""


def check_tile(tile: object) -> None:
    """Raises a ``UserError`` unless ``tile`` is 0 (no tiles) or an integer of at least 32."""
    if type(tile) is not int or (tile != 0 and tile < SMALLEST):
        raise UserError(f"tile (INPUT.TILE) is {tile!r}, expected 0 or an integer >= {SMALLEST}")


def tile_starts(size: int, tile: int) -> list[int]:
    """Returns evenly spaced starts of tiles along an axis, which overlap by ``OVERLAP`` or more."""
    if size <= tile:
        return [0]
    overlap = OVERLAP * tile
    number = math.ceil((size - overlap) / (tile - overlap))
    return [round(index * (size - tile) / (number - 1)) for index in range(number)]


def list_tiles(height: int, width: int, tile: int) -> list[Rectangle]:
    """Returns the tiles of an image, row by row; none if the whole image fits into one tile."""
    corners = list(itertools.product(tile_starts(height, tile), tile_starts(width, tile)))
    if len(corners) == 1:
        return []
    return [(x, y, min(tile, width), min(tile, height)) for y, x in corners]


def cut_records(
    records: Sequence[dict[str, Any]], tile: int, *, is_train: bool
) -> list[dict[str, Any]]:
    """Returns each record, followed by the records of its tiles; ``tile`` 0 adds no tiles.

    In training, a tile has the boxes of which it contains at least ``MIN_VISIBLE``. The mapper
    clips them. Tiles without boxes are thinned out evenly to ``EMPTY_SHARE`` of the others. In
    evaluation, all tiles are kept.

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
    """Drops tiles without boxes, evenly spaced, until few enough are left."""
    tiles = [record for record in records if TILE in record]
    num_empty = sum(not record["annotations"] for record in tiles)
    kept = min(num_empty, int(EMPTY_SHARE * (len(tiles) - num_empty)))
    left, index = [], 0
    for record in records:
        if TILE in record and not record["annotations"]:
            index += 1
            if index * kept // num_empty == (index - 1) * kept // num_empty:
                continue
        left.append(record)
    return left

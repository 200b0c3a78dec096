# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writes selected images as a list, a contact sheet and labelling tasks, and suspects as a page."""

import base64
import functools
import io
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
from jinja2 import Environment, PackageLoader, Template
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.api import Format, get_class_color, render_annotations
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically
from qbheat_det.core.image_files import IMAGE_FORMATS, turn_upright

from .labels import NEW_BOX_KINDS, Labels, LabelSuspect
from .selection import Selection

ColoredBoxes = list[tuple[Sequence[float], tuple[int, int, int]]]
"""Boxes, XYWH in pixels, with their RGB colors."""
_THUMBNAIL_SIDE = 320  # pixels
_MIN_SCORE = 0.3  # of boxes in tasks and on the contact sheet
_BLUE = (64, 156, 255)
_ORANGE = (255, 150, 30)
SUSPECT_FILES = ("suspects.json", "suspects.html")
"""The files that ``write_suspects`` writes."""
_FORMATS: dict[Format, str] = {"label-studio": "label_studio.json", "cvat": "cvat.json"}


def check_selection_folder(folder: Path, *sources: str | None) -> None:
    """Raises a ``UserError`` if a folder cannot be the output folder of a selection.

    It must neither have files of an earlier selection, nor contain one of the data ``sources``.
    """
    for name in ("selected.txt", "index.html", *_FORMATS.values()):
        if (folder / name).exists():
            raise UserError(f"'{folder}' already has '{name}': choose another --output")
    for source in filter(None, sources):
        if Path(source).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"'{source}' is inside '{folder}': choose another --output")


def write_selection(selection: Selection, folder: Path) -> list[Path]:
    """Writes ``selected.txt``, ``index.html``, ``label_studio.json`` and ``cvat.json``.

    If the selection has boxes of a detector, the last two files contain them as pre-annotations.
    Returns the paths of the files. Raises a ``UserError`` if the folder cannot be written.
    """
    check_writable(folder / "selected.txt")
    names = selection.class_names
    pool = selection.pool
    images = []  # as in ``Predictions.images``
    results = []  # boxes in COCO's results format
    rows = []  # of the contact sheet
    for number, path in enumerate(selection.files, start=1):
        image = open_upright(path)
        boxes = list_boxes(selection, path)
        images.append(
            {
                "id": number,
                "file_name": pool.names[path],
                "path": os.path.abspath(path),
                "height": image.height,
                "width": image.width,
            }
        )
        results += [{**box, "image_id": number} for box in boxes]
        counts = Counter(names.get(box["category_id"], box["category_id"]) for box in boxes)
        rows.append(
            {
                "name": os.path.basename(path),
                "path": path,
                "boxes": ", ".join(f"{count} {name}" for name, count in counts.items()),
                "image": encode_jpeg(draw_boxes(image, color_by_class(boxes))),
            }
        )
    files = {"selected.txt": "".join(f"{path}\n" for path in selection.files)}
    for tool, name in _FORMATS.items():
        tasks = render_annotations(results, images, list(names.values()), list(names), tool)
        files[name] = json.dumps(tasks, indent=1)
    files["index.html"] = load_template("sheet.html.j2").render(
        rows=rows,
        is_random=selection.strategy == "random",
        num_images=len(pool.files) - pool.num_labelled + len(pool.unreadable),
        num_labelled=pool.num_labelled,
        repeated=len(pool.repeated),
        unreadable=[f"{path}: {reason}" for path, reason in pool.unreadable.items()],
    )
    for name, content in files.items():
        write_atomically(folder / name, content.encode(errors="surrogateescape"))
    return [folder / name for name in files]


def draw_image(selection: Selection, path: str, *, side: int) -> PIL.Image.Image:
    """Draws an image with the detector's boxes, with at most ``side`` pixels per side."""
    boxes = list_boxes(selection, path)
    return draw_boxes(open_upright(path), color_by_class(boxes), side=side)


def list_boxes(selection: Selection, path: str) -> list[dict[str, Any]]:
    """Returns the boxes of an image with a score of at least 0.3, in COCO's results format.

    They are drawn on the contact sheet, and become pre-annotations.
    """
    return [box for box in selection.boxes.get(path, []) if box["score"] >= _MIN_SCORE]


def write_suspects(
    labels: Labels,
    suspects: Sequence[LabelSuspect],
    folder: Path,
    command: str,
    *,
    num_found: int | None = None,
) -> Path:
    """Writes ``suspects.json`` and the page ``suspects.html``. Returns the path of the page.

    The page shows the suspects with embedded images. A user selects the corrections to apply, and
    saves them as ``corrections.json``. Existing files of the same names are replaced.

    Args:
        labels: the inspected labels.
        suspects: the suspects to list, in descending order of probability.
        folder: output folder of both files.
        command: shell command that applies the corrections, to show on the page.
        num_found: total number of suspects, of which ``suspects`` are the most probable ones; by
            default, the number of ``suspects``. The page shows it.
    """
    content = {
        "data": labels.digest,
        "image_root": os.path.abspath(labels.file.image_root),
        "suspects": [asdict(suspect) for suspect in suspects],
    }
    rows = []
    for suspect in tqdm(suspects, desc="drawing", unit="label", disable=None, delay=1):
        path = os.path.join(labels.file.image_root, suspect.file_name)
        rows.append(
            {
                "text": suspect.text,
                "action": suspect.action,
                "name": suspect.file_name,
                "score": suspect.score,
                "image": encode_jpeg(draw_suspect(path, suspect)),
            }
        )
    if num_found is None:
        num_found = len(suspects)
    template = load_template("suspects.html.j2")
    page = template.render(rows=rows, content=content, command=command, num_found=num_found)
    texts = (json.dumps(content, indent=1), page)
    for name, text in zip(SUSPECT_FILES, texts, strict=True):
        write_atomically(folder / name, text.encode(errors="surrogateescape"))
    return folder / SUSPECT_FILES[1]


def draw_suspect(
    path: str, suspect: LabelSuspect, *, side: int = _THUMBNAIL_SIDE
) -> PIL.Image.Image:
    """Crops the image ``path`` to a suspect, and draws the annotated and the corrected box.

    The annotated box is blue, and a new box is orange. The longer side has ``side`` pixels.
    """
    drawn: ColoredBoxes = []
    if suspect.annotated_bbox:
        drawn.append((suspect.annotated_bbox, _BLUE))
    if suspect.kind in NEW_BOX_KINDS:
        drawn.append((suspect.bbox, _ORANGE))
    boxes = np.array([box for box, _ in drawn])  # (n, 4), XYWH
    top_left = boxes[:, :2].min(axis=0)
    bottom_right = (boxes[:, :2] + boxes[:, 2:]).max(axis=0)
    longer_side = float((bottom_right - top_left).max())
    margin = max(24.0, 0.75 * longer_side)
    image = open_upright(path)
    left, top = np.maximum(top_left - margin, 0).astype(int).tolist()
    right, bottom = np.minimum(bottom_right + margin + 1, image.size).astype(int).tolist()
    crop = image.crop((left, top, right, bottom))
    drawn_on_crop: ColoredBoxes = []
    for (x, y, width, height), color in drawn:
        drawn_on_crop.append(((x - left, y - top, width, height), color))
    return draw_boxes(crop, drawn_on_crop, side=side, enlarge=True)


@functools.cache
def load_template(name: str) -> Template:
    """Returns the template ``name`` of this folder. It escapes all text."""
    loader = PackageLoader("qbheat_det.labelling", "")
    return Environment(loader=loader, autoescape=True, trim_blocks=True).get_template(name)


def color_by_class(boxes: Sequence[dict[str, Any]]) -> ColoredBoxes:
    """Returns boxes in COCO's format with the colors of their classes."""
    return [(box["bbox"], get_class_color(box["category_id"])) for box in boxes]


def draw_boxes(
    image: PIL.Image.Image,
    boxes: ColoredBoxes,
    *,
    side: int = _THUMBNAIL_SIDE,
    enlarge: bool = False,
) -> PIL.Image.Image:
    """Draws boxes on a copy of an image whose longer side is at most ``side`` pixels.

    Boxes are in pixels of the original image. A smaller image keeps its size, or is enlarged to a
    longer side of ``side`` pixels if ``enlarge`` is True.
    """
    scale = side / max(image.size)
    if not enlarge:
        scale = min(1.0, scale)
    resized = image.convert("RGB").resize([max(1, round(edge * scale)) for edge in image.size])
    pen = PIL.ImageDraw.Draw(resized)
    for (x, y, width, height), color in boxes:
        corners = [x * scale, y * scale, (x + width) * scale, (y + height) * scale]
        pen.rectangle(corners, outline=color, width=3)
    return resized


def encode_jpeg(image: PIL.Image.Image) -> str:
    """Returns an image as a data URI with a JPEG file."""
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def open_upright(path: str) -> PIL.Image.Image:
    """Opens an image in the orientation that its EXIF data state."""
    with PIL.Image.open(path, formats=IMAGE_FORMATS) as image:
        return turn_upright(image)

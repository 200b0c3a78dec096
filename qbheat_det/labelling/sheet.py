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

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, write_atomically
from qbheat_det.data import IMAGE_FORMATS
from qbheat_det.data.images import turn_upright
from qbheat_det.inference.drawing import get_class_color
from qbheat_det.inference.results import Format, render_annotations

from .labels import Labels, LabelSuspect
from .selection import Selection

Drawn = list[tuple[Sequence[float], tuple[int, int, int]]]
_SIDE = 320  # side of a thumbnail in pixels
_LEAST_SCORE = 0.3  # lowest score of boxes in tasks and on the contact sheet
_BLUE, _ORANGE = (64, 156, 255), (255, 150, 30)
SUSPECT_FILES = ("suspects.json", "suspects.html")
"""The files that ``write_suspects`` writes."""
_FORMATS: dict[Format, str] = {"label-studio": "label_studio.json", "cvat": "cvat.json"}


def check_selection_folder(folder: Path, *sources: str | None) -> None:
    """Raises a ``UserError`` if a folder has files of a selection, or one of the data sources."""
    names = ["selected.txt", "index.html", *_FORMATS.values()]
    if found := next((name for name in names if (folder / name).exists()), None):
        raise UserError(f"'{folder}' already has '{found}': choose another --output")
    for source in filter(None, sources):
        if Path(source).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"'{source}' is inside '{folder}': choose another --output")


def write_selection(selection: Selection, folder: Path) -> list[Path]:
    """Writes ``selected.txt``, ``index.html``, ``label_studio.json`` and ``cvat.json``.

    If the selection has boxes of a detector, the last two files contain them as pre-annotations.
    Returns the paths of the files. Raises a ``UserError`` if the folder cannot be written.
    """
    check_writable(folder / "selected.txt")
    images, results, rows = [], [], []
    names, pool = selection.class_names, selection.pool
    for number, path in enumerate(selection.files, start=1):
        found, image = selection.boxes.get(path, []), _open_upright(path)
        images.append({"id": number, "file_name": pool.names[path], "path": os.path.abspath(path),
                       "height": image.height, "width": image.width})  # fmt: skip
        shown = [box for box in found if box["score"] >= _LEAST_SCORE]
        results += [{**box, "image_id": number} for box in shown]
        counts = Counter(names.get(box["category_id"], box["category_id"]) for box in shown)
        text = ", ".join(f"{count} {name}" for name, count in counts.items())
        thumbnail = _encode(_draw(image, _with_colors(shown)))
        rows.append({"name": os.path.basename(path), "path": path, "boxes": text,
                     "image": thumbnail})  # fmt: skip
    files = {"selected.txt": "".join(f"{path}\n" for path in selection.files)}
    for form, name in _FORMATS.items():
        tasks = render_annotations(results, images, [*names.values()], [*names], form)
        files[name] = json.dumps(tasks, indent=1)
    files["index.html"] = _load_template("sheet.html.j2").render(
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
    boxes = [box for box in selection.boxes.get(path, []) if box["score"] >= _LEAST_SCORE]
    return _draw(_open_upright(path), _with_colors(boxes), side=side)


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
        num_found: number of suspects before some were chosen for the list, to show on the page; by
            default, all are listed.
    """
    content = {"data": labels.digest, "suspects": [asdict(one) for one in suspects]}
    root = labels.file.image_root
    rows = [
        {"text": one.text, "name": one.file_name, "score": one.score,
         "image": draw_suspect(os.path.join(root, one.file_name), one)}
        for one in tqdm(suspects, desc="drawing", unit="label", disable=None, delay=1)
    ]  # fmt: skip
    if num_found is None:
        num_found = len(suspects)
    template = _load_template("suspects.html.j2")
    page = template.render(rows=rows, content=content, command=command, num_found=num_found)
    texts = (json.dumps(content, indent=1), page)
    for name, text in zip(SUSPECT_FILES, texts, strict=True):
        write_atomically(folder / name, text.encode(errors="surrogateescape"))
    return folder / SUSPECT_FILES[1]


def draw_suspect(path: str, suspect: LabelSuspect) -> str:
    """Draws annotated (blue) and corrected boxes (orange) on a crop. Returns it as a data URI."""
    drawn: Drawn = [(suspect.annotated_bbox, _BLUE)] if suspect.annotated_bbox else []
    if suspect.kind != "class":
        drawn.append((suspect.bbox, _ORANGE))
    boxes = np.array([box for box, _ in drawn])
    low, high = boxes[:, :2].min(0), (boxes[:, :2] + boxes[:, 2:]).max(0)
    margin = max(24.0, 0.75 * float((high - low).max()))
    image = _open_upright(path)
    left, top = np.maximum(low - margin, 0).astype(int).tolist()
    right, bottom = np.minimum(high + margin + 1, image.size).astype(int).tolist()
    moved: Drawn = [((x - left, y - top, *sides), color) for (x, y, *sides), color in drawn]
    return _encode(_draw(image.crop((left, top, right, bottom)), moved, enlarge=True))


@functools.cache
def _load_template(name: str) -> Template:
    loader = PackageLoader("qbheat_det.labelling", "")
    return Environment(loader=loader, autoescape=True, trim_blocks=True).get_template(name)


def _with_colors(boxes: Sequence[dict[str, Any]]) -> Drawn:
    return [(box["bbox"], get_class_color(box["category_id"])) for box in boxes]


def _draw(
    image: PIL.Image.Image, boxes: Drawn, *, side: int = _SIDE, enlarge: bool = False
) -> PIL.Image.Image:
    """Draws boxes (XYWH in pixels, color) on an image of at most ``side`` pixels per side."""
    scale = side / max(image.size) if enlarge else min(1.0, side / max(image.size))
    small = image.convert("RGB").resize([max(1, round(edge * scale)) for edge in image.size])
    pen = PIL.ImageDraw.Draw(small)
    for (x, y, width, height), color in boxes:
        corners = [x * scale, y * scale, (x + width) * scale, (y + height) * scale]
        pen.rectangle(corners, outline=color, width=3)
    return small


def _encode(image: PIL.Image.Image) -> str:
    """Returns an image as a data URI."""
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _open_upright(path: str) -> PIL.Image.Image:
    with PIL.Image.open(path, formats=IMAGE_FORMATS) as image:
        return turn_upright(image)

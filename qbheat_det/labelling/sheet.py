# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writes a selection as list, contact sheet and tasks, and suspicious labels as a page."""

import base64
import functools
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
import PIL.ImageOps
from jinja2 import Environment, PackageLoader, Template
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.files import check_writable, write_atomically
from qbheat_det.data import IMAGE_FORMATS
from qbheat_det.inference.drawing import get_class_color
from qbheat_det.inference.results import Format, render_annotations

from .labels import Labels, LabelSuspect, dump_suspects
from .selection import PoolBoxes, Selection

_SIDE = 320  # pixels of a thumbnail
_DRAWN_SCORE = 0.3
_MOST_SUSPECTS = 500  # on a page
_FORMATS: dict[Format, str] = {"label-studio": "label_studio.json", "cvat": "cvat.json"}


def write_selection(selection: Selection, folder: Path) -> list[Path]:
    """Writes ``selected.txt``, ``index.html``, ``label_studio.json`` and ``cvat.json``.

    The tasks hold the detector's boxes as pre-annotations if there is a detector.

    Returns:
        The paths of the files.

    Raises:
        UserError: the folder cannot be written.
    """
    check_writable(folder / "selected.txt")
    boxes = selection.boxes or _without_boxes(selection.files)
    files = {"selected.txt": "".join(f"{path}\n" for path in selection.files)}
    for form, name in _FORMATS.items():
        tasks = render_annotations(
            boxes.results, boxes.images, boxes.class_names, boxes.category_ids, form
        )
        files[name] = json.dumps(tasks, indent=1)
    files["index.html"] = render_sheet(selection)
    for name, content in files.items():
        write_atomically(folder / name, content.encode(errors="surrogateescape"))
    return [folder / name for name in files]


def _without_boxes(files: list[str]) -> PoolBoxes:
    import torch

    images = []
    for number, path in enumerate(files, start=1):
        with _open_upright(path) as image:
            width, height = image.size
        images.append({"id": number, "file_name": path, "height": height, "width": width})
    return PoolBoxes([], images, [], [], torch.zeros(len(files)))


def render_sheet(selection: Selection) -> str:
    """Returns the contact sheet as one HTML page without references to other files."""
    rows = []
    by_file: dict[str, list[tuple[list[float], int, float]]] = {}
    names: dict[int, str] = {}
    if selection.boxes:
        ids = selection.boxes.category_ids or range(1, 1 + len(selection.boxes.class_names))
        names = dict(zip(ids, selection.boxes.class_names, strict=False))
        for box in selection.boxes.results:
            if box["score"] >= _DRAWN_SCORE:
                found = by_file.setdefault(box["file_name"], [])
                found.append((box["bbox"], box["category_id"], box["score"]))
    for path in selection.files:
        drawn = by_file.get(path, [])
        counts: dict[str, int] = {}
        for _, label, _ in drawn:
            name = names.get(label, str(label))
            counts[name] = counts.get(name, 0) + 1
        text = ", ".join(f"{count} {name}" for name, count in counts.items())
        rows.append({"name": os.path.basename(path), "path": path, "boxes": text,
                     "image": draw_thumbnail(path, drawn)})  # fmt: skip
    pool = selection.pool
    return _load_template("sheet.html.j2").render(
        rows=rows,
        num_images=len(pool.files) - len(pool.labelled) + len(pool.unreadable),
        num_labelled=len(pool.labelled),
        repeated=len(pool.repeated),
        unreadable=[f"{path}: {reason}" for path, reason in pool.unreadable.items()],
    )


def write_suspects(
    labels: Labels, suspects: Sequence[LabelSuspect], folder: Path, command: str
) -> Path:
    """Writes ``suspects.json`` and the page ``suspects.html``, on which a person ticks corrections.

    The page shows the most probable suspects, embeds its images, and makes ``corrections.json``.

    Args:
        labels: the inspected labels.
        suspects: the most probable first.
        folder: folder of both files.
        command: the command that applies the corrections, which the page names.

    Returns:
        The page.
    """
    shown = suspects[:_MOST_SUSPECTS]
    root = labels.file.image_root
    rows = [
        {"text": one.text, "name": one.file_name, "score": one.score,
         "image": draw_suspect(os.path.join(root, one.file_name), one)}
        for one in tqdm(shown, desc="drawing", unit="label", disable=None, delay=1)
    ]  # fmt: skip
    content = {"data": labels.digest, "suspects": [asdict(one) for one in shown]}
    page = _load_template("suspects.html.j2").render(rows=rows, content=content, command=command)
    write_atomically(folder / "suspects.json", dump_suspects(labels, suspects).encode())
    write_atomically(folder / "suspects.html", page.encode(errors="surrogateescape"))
    return folder / "suspects.html"


def draw_suspect(path: str, suspect: LabelSuspect) -> str:
    """Returns the surroundings of a label (blue) and its correction (orange), as a data URI."""
    drawn = [(box, color) for box, color in (
        (suspect.annotated_bbox, (64, 156, 255)),
        (None if suspect.kind == "class" else suspect.bbox, (255, 150, 30)),
    ) if box]  # fmt: skip
    corners = [(x, y, x + width, y + height) for (x, y, width, height), _ in drawn]
    lows, highs = [[*map(min, zip(*corners, strict=True))][:2],
                   [*map(max, zip(*corners, strict=True))][2:]]  # fmt: skip
    margin = max(24.0, 0.75 * max(highs[0] - lows[0], highs[1] - lows[1]))
    with _open_upright(path) as image:
        left, top = (int(max(0, low - margin)) for low in lows)
        right, bottom = (int(min(size, high + margin) + 1)
                         for size, high in zip(image.size, highs, strict=True))  # fmt: skip
        part = image.convert("RGB").crop((left, top, right, bottom))
    scale = _SIDE / max(part.size)
    part = part.resize([max(1, round(side * scale)) for side in part.size])
    pen = PIL.ImageDraw.Draw(part)
    for (x0, y0, x1, y1), (_, color) in zip(corners, drawn, strict=True):
        box = [(x0 - left) * scale, (y0 - top) * scale, (x1 - left) * scale, (y1 - top) * scale]
        pen.rectangle(box, outline=color, width=3)
    return _to_uri(part)


@functools.cache
def _load_template(name: str) -> Template:
    loader = PackageLoader("qbheat_det.labelling", "")
    return Environment(loader=loader, autoescape=True, trim_blocks=True).get_template(name)


def draw_thumbnail(path: str, boxes: list[tuple[list[float], int, float]]) -> str:
    """Returns a small JPEG with boxes (XYWH in pixels, class, score), as a data URI."""
    with _open_upright(path) as image:
        scale = min(1.0, _SIDE / max(image.size))
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        small = image.convert("RGB").resize(size)
    pen = PIL.ImageDraw.Draw(small)
    for (x, y, width, height), label, _ in boxes:
        corners = [x * scale, y * scale, (x + width) * scale, (y + height) * scale]
        pen.rectangle(corners, outline=get_class_color(label), width=2)
    return _to_uri(small)


def _to_uri(image: PIL.Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _open_upright(path: str) -> PIL.Image.Image:
    with PIL.Image.open(path, formats=IMAGE_FORMATS) as image:
        return PIL.ImageOps.exif_transpose(image)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which class is taken for which: a picture for two classes as for a thousand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure

from qbheat_det.core.files import write_atomically
from qbheat_det.evaluation import find_confusions

from .charts import INK, Format, Theme, encode, style_axes, to_text, to_texts

Counts = npt.NDArray[np.int64]
_MOST_NUMBERED = 16  # classes whose cells have room for a number
_MOST_NAMED = 110  # classes whose names have room at the sides
_MOST_CELLS = 256  # a side; of more classes, several share a cell
_LIST_WIDTH, _LINE_HEIGHT = 4.6, 0.18  # of the list of confusions, in inches
_MOST_LISTED = 40
_LONGEST = 26  # letters of a name, unless two would be alike
_LETTER = 0.07  # inches
_RIGHT, _WRONG = "#1f6feb", "#d64550"
_PAGES = {"light": "#ffffff", "dark": "#1a1c20"}


def plot_confusion(
    confusion: Counts,
    class_names: Sequence[str],
    *,
    title: str = "",
    theme: Theme = "light",
    format: Format = "png",
) -> bytes:
    """Draws how the images of each class (a row) were classified, and lists what is confused most.

    The colour of a cell is the share of its row, blue on the diagonal and red beside it; small
    shares are drawn stronger than they are. Cells have numbers where there is room for them, and
    rows names; of more classes the numbers of the classes, which the list repeats. Where several
    share a cell, it shows the mean share of those that have images on the diagonal, and the largest
    share beside it. What the classes of one cell are taken for among themselves is in the list
    alone.

    Args:
        confusion: (K, K), images of class i that were taken for class j.
        class_names: K names.
        title: above the matrix.
        theme: of the page.
        format: of the file.

    Raises:
        ValueError: the matrix is not one of these classes.
    """
    num_classes = len(class_names)
    if confusion.shape != (num_classes, num_classes) or not num_classes:
        raise ValueError(f"{num_classes} classes do not have a matrix of shape {confusion.shape}")
    names = to_texts(map(_make_printable, class_names), longest=_LONGEST)
    more = _LETTER * max(0, max(map(len, names)) - _LONGEST)
    side = float(np.clip(0.11 * num_classes, 3.2, 9.0))
    margin = 2.3 + more if num_classes <= _MOST_NAMED else 0.8
    top, list_width = 0.5, _LIST_WIDTH + 2 * more
    width, height = margin + side + 0.4 + list_width, margin + side + top
    # Places in inches: with a hundred names, constrained layout takes ten times as long.
    figure = Figure(figsize=(width, height))
    left = figure.add_axes((margin / width, margin / height, side / width, side / height))
    _draw_matrix(left, confusion, names, theme)
    figure.text(
        margin / width, 1 - 0.6 * top / height, to_text(_make_printable(title), longest=80),
        fontsize=11,
        color=INK[theme],
    )  # fmt: skip
    figure.text(
        1 - list_width / width,
        1 - top / height,
        _list_confusions(confusion, names, room=int((height - top) / _LINE_HEIGHT) - 2),
        fontsize=8,
        color=INK[theme],
        va="top",
        linespacing=1.5,
    )
    return encode(figure, theme, format)


def draw_confusion(classification_json: Path, output_png: Path) -> None:
    """Draws the confusion matrix of a ``classification.json`` of the evaluator."""
    content = json.loads(classification_json.read_text(encoding="utf-8"))
    classes = content["classes"]
    index = {row["name"]: i for i, row in enumerate(classes)}
    counts = np.diag([round(row["images"] * (row["top1"] or 0) / 100) for row in classes])
    for row in content["confusions"]:
        counts[index[row["class"]], index[row["taken_for"]]] = row["images"]
    title = f"{content['dataset']}: top-1 {content['top1'] or 0:.1f} %"
    picture = plot_confusion(counts, list(index), title=title)
    write_atomically(output_png, lambda stream: stream.write(picture))


def _draw_matrix(axes: Axes, confusion: Counts, names: Sequence[str], theme: Theme) -> None:
    num_classes = len(names)
    totals = confusion.sum(axis=1)
    shares, per_cell = _pool(confusion / totals.clip(min=1)[:, None], totals > 0)
    end = len(shares) * per_cell - 0.5
    on_diagonal = np.eye(len(shares), dtype=bool)
    norm = PowerNorm(0.5, vmin=0, vmax=1)
    for color, hidden in ((_WRONG, on_diagonal), (_RIGHT, ~on_diagonal)):
        palette = LinearSegmentedColormap.from_list(color, [_PAGES[theme], color])
        axes.imshow(
            np.ma.masked_array(shares, mask=hidden),
            cmap=palette,
            norm=norm,
            extent=(-0.5, end, end, -0.5),
            interpolation="nearest",
        )
    style_axes(axes, theme)
    axes.set_xlabel("taken for" if per_cell == 1 else f"taken for ({per_cell} classes a cell)")
    axes.set_ylabel("class")
    if num_classes <= _MOST_NAMED:
        size = 8 if num_classes <= 60 else 5
        axes.set_xticks(range(num_classes), names, rotation=90, fontsize=size)
        axes.set_yticks(range(num_classes), names, fontsize=size)
        axes.tick_params(labelcolor=INK[theme])
    axes.set_xlim(-0.5, num_classes - 0.5)
    axes.set_ylim(num_classes - 0.5, -0.5)
    if num_classes <= _MOST_NUMBERED:
        for (row, column), count in np.ndenumerate(confusion):
            if count:
                strong = shares[row, column] > 0.35
                color = "#ffffff" if strong else INK[theme]
                axes.text(
                    column, row, str(count), ha="center", va="center", fontsize=7, color=color
                )


def _list_confusions(confusion: Counts, names: Sequence[str], *, room: int) -> str:
    """Returns a line for each of the most frequent confusions, as many as there is room for."""
    totals = confusion.sum(axis=1)
    numbered = len(names) > _MOST_NAMED

    def label(index: int) -> str:
        return f"{names[index]} ({index})" if numbered else names[index]

    lines = [
        f"{label(i)} \N{RIGHTWARDS ARROW} {label(j)}:  {count:,} of {totals[i]:,}"
        for i, j, count in find_confusions(confusion)[: min(room, _MOST_LISTED)]
    ]
    wrong, total = int(totals.sum() - confusion.trace()), int(totals.sum())
    head = f"Most confused ({wrong:,} of {total:,} images are wrong)"
    return "\n".join([head, "", *(lines or ["none"])])


def _pool(
    shares: npt.NDArray[Any], has_images: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[Any], int]:
    """Returns the shares of blocks of classes, see ``plot_confusion``, and classes a block.

    Args:
        shares: (K, K), in rows that sum to one; zeros in those of classes without images.
        has_images: (K,).
    """
    num_classes = len(shares)
    per_cell = -(-num_classes // _MOST_CELLS)
    if per_cell == 1:
        return shares, 1
    starts = np.arange(0, num_classes, per_cell)
    counted = np.add.reduceat(has_images.astype(int), starts)
    right = np.add.reduceat(shares.diagonal(), starts) / counted.clip(min=1)
    pooled = np.maximum.reduceat(np.maximum.reduceat(shares, starts, axis=0), starts, axis=1)
    np.fill_diagonal(pooled, right)
    return pooled, per_cell


def _make_printable(name: str) -> str:
    """Makes a name fit to be drawn: any bytes may name a folder."""
    text = name.encode(errors="backslashreplace").decode()
    return "".join(letter if letter.isprintable() else "?" for letter in text)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Draws docs/architecture.svg: the areas of the package, their sizes, and who imports whom.

usage: python -m docs.draw_architecture

Arrows are read from the import statements. If A imports B and B imports C, no arrow is drawn from A
to C.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from tests.import_graph import area_of, imports, module_files

ROOT = Path(__file__).resolve().parents[1]
ROWS = (
    ("app", "labelling"),
    ("api",),
    ("analysis", "export"),
    ("engine", "inference"),
    ("feature_cache", "probing", "deployment", "model_zoo", "fast"),
    (
        "modeling.dense_detectors",
        "modeling.detr",
        "modeling.joined",
        "modeling.pretrain",
        "modeling.classification",
    ),
    ("modeling.distillation_teacher", "tasks"),
    ("data", "evaluation", "checkpoint", "solver", "modeling.backbone", "modeling.parts"),
    ("layers", "config", "core", "modeling.contracts"),
)
COLORS = (
    "#ece0f6",
    "#f6dede",
    "#fbe0ea",
    "#fde7d4",
    "#fff3c9",
    "#dcebfb",
    "#dcebfb",
    "#e3f3df",
    "#eeeeee",
)
"""The color of each row."""
WIDTH = 1180  # pixels of the drawing
ROW_HEIGHT = 108
MARGIN = 20  # above the first row and below the last
BOX_WIDTH = 176
BOX_HEIGHT = 52


def draw() -> str:
    """Returns the drawing as SVG."""
    sizes = count_lines()
    places = {
        area: ((index + 0.5) * WIDTH / len(row), MARGIN + level * ROW_HEIGHT)
        for level, row in enumerate(ROWS)
        for index, area in enumerate(row)
    }
    height = (len(ROWS) - 1) * ROW_HEIGHT + BOX_HEIGHT + 2 * MARGIN
    body = [*draw_arrows(places), *draw_boxes(places, sizes)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="sans-serif" text-anchor="middle">',
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#888"/></marker>',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *body,
            "</svg>\n",
        ]
    )


def draw_boxes(places: dict[str, tuple[float, float]], sizes: dict[str, int]) -> Iterator[str]:
    """Yields a box for each area with its name and number of lines.

    ``places`` has the middle of the upper edge of each box.
    """
    for level, row in enumerate(ROWS):
        for area in row:
            x, y = places[area]
            yield (
                f'<rect x="{x - BOX_WIDTH / 2:.0f}" y="{y}" width="{BOX_WIDTH}" '
                f'height="{BOX_HEIGHT}" rx="6" '
                f'fill="{COLORS[level]}" stroke="#555"/>'
            )
            name = area.replace(".", "/")
            yield f'<text x="{x:.0f}" y="{y + 22}" font-size="14">{name}</text>'
            lines = f"{sizes.get(area, 0):,} lines"
            yield f'<text x="{x:.0f}" y="{y + 41}" font-size="12" fill="#555">{lines}</text>'


def draw_arrows(places: dict[str, tuple[float, float]]) -> Iterator[str]:
    """Yields an arrow for each import that does not follow from other imports."""
    for source, targets in sorted(reduce_graph(area_graph()).items()):
        for target in sorted(targets):
            x1, y1 = places[source]
            x2, y2 = places[target]
            if y1 == y2:  # beside each other: from edge to edge
                middle = y1 + BOX_HEIGHT / 2
                half_width = math.copysign(BOX_WIDTH / 2, x2 - x1)
                start = f"{x1 + half_width:.0f} {middle:.0f}"
                end = f"{x2 - half_width:.0f} {middle:.0f}"
                path = f"M{start}L{end}"
            else:
                y1 += BOX_HEIGHT
                bend = (y2 - y1) / 2
                path = f"M{x1:.0f} {y1}C{x1:.0f} {y1 + bend} {x2:.0f} {y2 - bend} {x2:.0f} {y2}"
            yield f'<path d="{path}" fill="none" stroke="#888" marker-end="url(#tip)"/>'


def area_graph() -> dict[str, set[str]]:
    """Returns for each area the areas that its files import."""
    graph: dict[str, set[str]] = {area: set() for row in ROWS for area in row}
    for module, names in imports().items():
        area = area_of(module)
        if area is not None:
            targets = {area_of(name) for name in names} - {None, area}
            graph[area] |= {target for target in targets if target is not None}
    return graph


def reduce_graph(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Removes imports that follow from other imports."""

    def reach(area: str) -> set[str]:
        return graph[area].union(*(reach(target) for target in graph[area]))

    return {
        area: targets - set().union(*(reach(target) for target in targets))
        for area, targets in graph.items()
    }


def count_lines() -> dict[str, int]:
    """Returns the number of lines of each area."""
    sizes: dict[str, int] = {}
    for module, path in module_files().items():
        area = area_of(module) or ""
        sizes[area] = sizes.get(area, 0) + len(path.read_text("utf-8").splitlines())
    return sizes


if __name__ == "__main__":
    target = ROOT / "docs" / "architecture.svg"
    target.write_text(draw(), encoding="utf-8")
    print(target.relative_to(ROOT))

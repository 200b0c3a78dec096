# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Bad data through the flags of tools/train_net.py: an error names file and id before a run.

The other bad entries are in tests/data.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.engine import build_config

from .tiny_training import parse_run

Spoil = Callable[[Path], object]


def edit(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Changes the annotations of a folder."""

    def spoil(folder: Path) -> None:
        path = folder / "annotations.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return spoil


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


RLE = {"size": [64, 64], "counts": [0, 64, 64 * 63]}
RETINANET, MASK_RCNN = "retinanet_285M_toy.yaml", "mask_rcnn_285M_toy.yaml"


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("spoil", "named", "config"),
    [
        (lambda f: (f / "images" / "000002.jpg").unlink(), "json: image id 2", RETINANET),
        (lambda f: truncate(f / "images" / "000002.jpg"), r"2.jpg' \(image id 2\)", RETINANET),
        (edit(lambda c: c["annotations"][1].update(category_id=3)), "annotation id 2", RETINANET),
        (edit(lambda c: c["images"][1].update(width=65)), "annotated with 65 x 64", RETINANET),
        (lambda f: truncate(f / "annotations.json"), r"annotations\.json", RETINANET),
        (edit(lambda c: c["annotations"][1].pop("segmentation")), r"id 1.*MASK_ON", MASK_RCNN),
        (edit(lambda c: c["annotations"][1].update(segmentation=RLE)), "MASK_FORMAT", MASK_RCNN),
    ],
)
def test_bad_data_are_named_before_anything_is_written(
    tmp_path: Path, tiny_data: Path, spoil: Spoil, named: str, config: str, split: str
) -> None:
    flags = []
    for name in ("train", "val"):
        folder = Path(shutil.copytree(tiny_data, tmp_path / name))
        if name == split:
            spoil(folder)
        flags += ["--data" if name == "train" else "--val", str(folder / "annotations.json")]
    output = tmp_path / "output"
    recipe = get_config_path(f"quick_schedules/{config}")
    with pytest.raises(UserError, match=named) as error:
        build_config(parse_run(recipe, {"OUTPUT_DIR": str(output)}, *flags))
    assert f"/{split}/" in str(error.value)
    assert not output.exists()

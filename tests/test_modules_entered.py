# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How many of our modules a reader meets on the way of one image, so that it stays few."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
from PIL import Image

import qbheat_det.api  # noqa: F401  imports call decorators of modules that no image enters

from .tool_modules import load_tool

OF_PREDICT = 24


@contextmanager
def modules_entered() -> Iterator[set[str]]:
    """Collects the modules of the package whose functions are called, imports aside."""
    entered: set[str] = set()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("qbheat_det") and frame.f_code.co_name != "<module>":
            entered.add(name)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def save_image(path: Path) -> Path:
    """Writes noise as a JPEG of 120 x 90 pixels."""
    pixels = np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_one_image_through_predict_enters_few_modules(tmp_path: Path) -> None:
    predict = load_tool("predict")
    image, drawn = save_image(tmp_path / "image.jpg"), tmp_path / "drawn"
    with modules_entered() as entered:
        command = f"--weights qbheat://retinanet/285M_bccd --images {image} --output {drawn}"
        predict.main([*command.split(), "--device", "cpu"])
    assert list(drawn.iterdir())
    assert len(entered) <= OF_PREDICT, "\n".join(sorted(entered))

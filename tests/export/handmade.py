# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Hand-written ONNX files with the descriptions of exports: tests need no exporter for them."""

import json
from pathlib import Path

import pytest
from PIL import Image

from qbheat_det.config import dump_config, get_cfg
from qbheat_det.export.formats import (
    METADATA_KEY,
    SHARED_ENCODER_KEY,
    TASK_OUTPUTS,
    ExportInfo,
    Task,
)

onnx = pytest.importorskip("onnx")

# One box around the image, scored by the mean of the first channel.
_HEADER = '<ir_version: 9, opset_import: ["" : 18]>\n'
_FOUND = "(float[N,1,4] boxes, float[N,1] scores, int64[N,1] labels, int64[N] counts)"
_FIND = """
    zero = Constant<value_ints = [0]>()
    swapped = Constant<value_ints = [1, 0]>()
    all = Constant<value_floats = [255.0]>()
    corner = Gather(size, swapped)
    ends = Concat<axis = 0>(zero, zero, corner)
    box = Cast<to = 1>(ends)
    both = Constant<value_ints = [0, 1]>()
    boxes = Unsqueeze(box, both)
    first = Gather<axis = 3>(pixels, zero)
    part = Div(first, all)
    mean = ReduceMean<keepdims = 0>(part)
    scores = Unsqueeze(mean, both)
    labels = Constant<value = int64[1,1] {1}>()
    counts = Constant<value = int64[1] {1}>()
}"""
DETECTOR = f"""{_HEADER}detector (uint8[N,H,W,3] images) => {_FOUND} {{
    size = Shape<start = 1, end = 3>(images)
    pixels = Cast<to = 1>(images){_FIND}"""
_READ = "(float[N,H,W,3] pixels, int64[4] sizes)"
HEAD = f"""{_HEADER}head {_READ} => {_FOUND} {{
    from = Constant<value_ints = [0]>()
    to = Constant<value_ints = [2]>()
    size = Slice(sizes, from, to){_FIND}"""
ENCODER = f"""{_HEADER}encoder (uint8[N,H,W,3] images) => {_READ} {{
    size = Shape<start = 1, end = 3>(images)
    two = Constant<value_ints = [2]>()
    resized = Div(size, two)
    sizes = Concat<axis = 0>(size, resized)
    pixels = Cast<to = 1>(images)
}}"""
# Scores of three classes: the means of the channels over their sum.
CLASSIFIER = f"""{_HEADER}classifier (uint8[N,H,W,3] images) => (float[N,3] scores) {{
    axes = Constant<value_ints = [1, 2]>()
    pixels = Cast<to = 1>(images)
    means = ReduceMean<keepdims = 0>(pixels, axes)
    last = Constant<value_ints = [1]>()
    sum = ReduceSum(means, last)
    scores = Div(means, sum)
}}"""


def write(path: Path, text: str, **metadata: str) -> Path:
    """Writes ONNX's text form as a file."""
    model = onnx.parser.parse_model(text)
    onnx.helper.set_model_props(model, metadata)
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(model.SerializeToString())
    return path


def describe(task: Task = "detection", **changes: object) -> dict[str, str]:
    """Returns the metadata of an export, with other values for some of its fields."""
    cfg = get_cfg()
    names: tuple[str, ...] = ("cat", "dog")
    if task == "classification":
        cfg.INPUT.DATASET_MAPPER_NAME = "classify"
        names = ("red", "green", "blue")
    outputs = TASK_OUTPUTS.get(task, ("pixels", "sizes"))
    info = ExportInfo(task, outputs, "RGB", names, (4, 9), config=dump_config(cfg))
    return {METADATA_KEY: json.dumps(json.loads(info.to_json()) | changes)}


def write_shared(folder: Path, *, other: str = "a") -> Path:
    """Writes the encoder "a" and the heads "one" and "two", which name the encoder ``other``."""
    encoder = {SHARED_ENCODER_KEY: "a"}
    write(folder / "encoder.onnx", ENCODER, **describe("features"), **encoder)
    for name in ("one", "two"):
        write(folder / f"head_{name}.onnx", HEAD, **describe(), **{SHARED_ENCODER_KEY: other})
    return folder


def save_image(
    path: Path, color: tuple[int, int, int] = (255, 0, 0), size: tuple[int, int] = (64, 96)
) -> str:
    """Writes an image of one colour, of ``size`` (width, height)."""
    Image.new("RGB", size, color).save(path)
    return str(path)

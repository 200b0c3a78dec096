# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/run_onnx.py on tiny hand-made files: what it finds, and one sentence for each mistake."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from qbheat_det.engine.exporting.export_info import METADATA_KEY, SPLIT_KEY, ExportInfo
from qbheat_det.engine.exporting.split_model import SplitModel

from qbheat_det.config import dump_config, get_cfg
from qbheat_det.core.errors import UserError
from tests.tool_modules import TOOLS, load_tool

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

# One box around the image, scored by the mean of the first channel.
_HEADER = '<ir_version: 9, opset_import: ["" : 18]>\n'
_FOUND = "(float[1,1,4] boxes, float[1,1] scores, int64[1,1] labels, int64[1] counts)"
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
_DETECTOR = f"""{_HEADER}detector (uint8[N,H,W,3] images) => {_FOUND} {{
    size = Shape<start = 1, end = 3>(images)
    pixels = Cast<to = 1>(images){_FIND}"""
_READ = "(float[N,H,W,3] pixels, int64[4] sizes)"
_HEAD = f"""{_HEADER}head {_READ} => {_FOUND} {{
    from = Constant<value_ints = [0]>()
    to = Constant<value_ints = [2]>()
    size = Slice(sizes, from, to){_FIND}"""
_ENCODER = f"""{_HEADER}encoder (uint8[N,H,W,3] images) => {_READ} {{
    size = Shape<start = 1, end = 3>(images)
    two = Constant<value_ints = [2]>()
    resized = Div(size, two)
    sizes = Concat<axis = 0>(size, resized)
    pixels = Cast<to = 1>(images)
}}"""


def _write(path: Path, text: str, **metadata: str) -> Path:
    model = onnx.parser.parse_model(text)
    onnx.helper.set_model_props(model, metadata)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def _info(task: str = "detection", outputs: str = "boxes scores labels counts") -> dict[str, str]:
    classes = ("cat", "dog")
    info = ExportInfo(
        task=task,  # type: ignore[arg-type]
        outputs=tuple(outputs.split()),
        pixel_format="RGB",
        class_names=classes if task == "detection" else (),
        config=dump_config(get_cfg()),
    )
    return {METADATA_KEY: info.to_json()}


def _write_split(folder: Path, encoder: str = "a", multiple_of: int = 0) -> Path:
    split = {SPLIT_KEY: json.dumps({"encoder": "a", "multiple_of": multiple_of})}
    own = {SPLIT_KEY: json.dumps({"encoder": encoder, "multiple_of": multiple_of})}
    _write(folder / "encoder.onnx", _ENCODER, **_info("features", "pixels sizes"), **own)
    for name in ("one", "two"):
        _write(folder / f"head_{name}.onnx", _HEAD, **_info(), **split)
    return folder


def _save_lying(path: Path) -> Path:
    """Writes a portrait of 20 by 40 pixels as phones do: lying, with a note to turn it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20), (255, 0, 0)).save(path, exif=exif)
    return path


@pytest.fixture(scope="module")
def run_onnx() -> ModuleType:
    return load_tool("run_onnx")


def test_images_that_cannot_be_read_are_skipped_and_others_stand_upright(
    run_onnx: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _write(tmp_path / "detector.onnx", _DETECTOR, **_info())
    portrait = _save_lying(tmp_path / "portrait.jpg")
    Image.fromarray(np.full((4, 4), 9000, dtype=np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / "text.png").write_text("no image")
    bad = ["none.png", "deep.png", "text.png"]
    images = [*(str(tmp_path / name) for name in bad), str(portrait)]
    assert run_onnx.main([str(model), *images]) == 1
    shown = capsys.readouterr()
    (found,) = [json.loads(line) for line in shown.out.splitlines()]
    assert found["image"] == str(portrait)
    (one,) = found["found"]
    assert one["name"] == "dog"
    assert one["box"] == [0, 0, 20, 40]
    assert one["score"] > 0.98  # red comes first
    for line, name, reason in zip(
        shown.err.splitlines(),
        bad,
        ["No such file", "16 bits of grey", "cannot identify"],
        strict=True,
    ):
        assert line.startswith(f"skipped {tmp_path / name}: ")
        assert reason in line


def test_heads_that_pad_differently_take_only_images_that_need_no_padding(
    run_onnx: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _write_split(tmp_path / "split", multiple_of=16)
    sizes = [(64, 96), (64, 90), (90, 64)]  # twice as large as after the resize
    for index, size in enumerate(sizes):
        Image.new("RGB", size, (255, 0, 0)).save(tmp_path / f"{index}.png")
    images = [str(tmp_path / f"{index}.png") for index in range(3)]
    assert run_onnx.main([str(folder), *images]) == 1
    shown = capsys.readouterr()
    box = {"name": "dog", "score": 1.0, "box": [0, 0, 64, 96]}
    assert [json.loads(line) for line in shown.out.splitlines()] == [
        {"image": images[0], "found": {"one": [box], "two": [box]}}
    ]
    reasons = ["here 45 and 32, are multiples of 16", "here 32 and 45, are multiples of 16"]
    for line, reason in zip(shown.err.splitlines(), reasons, strict=True):
        assert reason in line
    model = SplitModel.open(folder, device="cpu")  # as this package says
    for (width, height), reason in zip(sizes[1:], reasons, strict=True):
        with pytest.raises(UserError, match=reason):
            model(np.zeros((1, height, width, 3), dtype=np.uint8))
    found = ["--weights", str(folder / "head_one.onnx"), "--json", str(tmp_path / "found.json")]
    assert load_tool("predict").main([*found, "--device", "cpu", "--input", *images]) == 1
    (one,) = json.loads((tmp_path / "found.json").read_text())
    assert (one["file_name"], one["bbox"]) == ("0.png", [0, 0, 64, 96])
    assert run_onnx.main([str(_write_split(tmp_path / "any")), *images]) == 0


def _cut(folder: Path) -> Path:
    path = _write(folder / "detector.onnx", _DETECTOR, **_info())
    path.write_bytes(path.read_bytes()[:100])
    return path


def _without_heads(folder: Path) -> Path:
    for head in _write_split(folder).glob("head_*.onnx"):
        head.unlink()
    return folder


_MISTAKES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda folder: folder / "detector.onnx", "does not exist"),
    "damaged": (_cut, "cannot be opened; it may be truncated"),
    "foreign": (lambda folder: _write(folder / "x.onnx", _DETECTOR), "is no file of tools/export"),
    "untrue": (
        lambda folder: _write(folder / "x.onnx", _ENCODER, **_info()),
        "does not give what it says of itself",
    ),
    "head": (lambda folder: _write_split(folder) / "head_one.onnx", "one part of a split export"),
    "empty": (lambda folder: folder.mkdir() or folder, "encoder.onnx' does not exist"),
    "headless": (_without_heads, "has no head_NAME.onnx beside its encoder.onnx"),
    "other": (lambda folder: _write_split(folder, "b"), "head_one.onnx' was not exported with the"),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_model_that_cannot_be_run_ends_in_a_sentence(
    run_onnx: ModuleType, mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, reason = _MISTAKES[mistake]
    assert run_onnx.main([str(make(tmp_path / "model")), "photo.jpg"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert reason in line


def test_the_lines_of_the_page_find_what_the_script_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (TOOLS.parent / "docs" / "deploying.md").read_text(encoding="utf-8")
    code = next(re.finditer(r"```python\n(.*?)```", page, flags=re.DOTALL))[1]
    _write(tmp_path / "detector.onnx", _DETECTOR, **_info())
    _save_lying(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/deploying.md", "exec"), {})
    assert re.fullmatch(r"dog (0\.9\d*|1\.0) \[ *0\. +0\. +20\. +40\.\]\n", capsys.readouterr().out)

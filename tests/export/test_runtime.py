# Copyright (c) qbheat_det contributors. Apache-2.0.
"""ExportedModel, the program in docs/export.md and tools/predict.py on hand-written files."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from qbheat_det.config import dump_config, get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.inference.exported import (
    METADATA_KEY,
    SHARED_ENCODER_KEY,
    TASK_OUTPUTS,
    ExportedModel,
    ExportInfo,
    SharedEncoderModel,
)
from tests.data.pictures import save
from tests.tool_modules import TOOLS, load_tool, refuse

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

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


def write(path, text, **metadata):
    """Writes ONNX's text form as a file."""
    model = onnx.parser.parse_model(text)
    onnx.helper.set_model_props(model, metadata)
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(model.SerializeToString())
    return path


def describe(task="detection", **changes):
    """Returns the metadata of an export, with other values for some of its fields."""
    cfg = get_cfg()
    names = ("cat", "dog")
    if task == "classification":
        cfg.INPUT.DATASET_MAPPER_NAME = "classify"
        names = ("red", "green", "blue")
    outputs = TASK_OUTPUTS.get(task, ("pixels", "sizes"))
    info = ExportInfo(task, outputs, "RGB", names, (4, 9), config=dump_config(cfg))
    return {METADATA_KEY: json.dumps(json.loads(info.to_json()) | changes)}


def write_shared(folder, *, other="a"):
    """Writes the encoder "a" and the heads "one" and "two", which name the encoder ``other``."""
    encoder = {SHARED_ENCODER_KEY: "a"}
    write(folder / "encoder.onnx", ENCODER, **describe("features"), **encoder)
    for name in ("one", "two"):
        write(folder / f"head_{name}.onnx", HEAD, **describe(), **{SHARED_ENCODER_KEY: other})
    return folder


def save_image(path, color=(255, 0, 0), size=(64, 96)):
    """Writes an image of one colour, of ``size`` (width, height)."""
    Image.new("RGB", size, color).save(path)
    return str(path)


PREDICT = load_tool("predict")

_CHANGES = [
    {"class_names": "cat"}, {"outputs": ["boxes"]}, {"config": 5}, {"category_ids": [True]},
    {"score_threshold": "low"}, {"pixel_format": "GBR"}, {"format": 2}, {"surprise": 1},
    {"image_size": [4]}, {"image_size": [4, 5, 3]}, {"category_ids": [4]},
]  # fmt: skip


def _check_refused(path):
    with pytest.raises(UserError, match=re.escape(str(path))):
        ExportedModel.open(path) if path.suffix == ".onnx" else SharedEncoderModel(path)


def test_invalid_files_are_refused_by_name(tmp_path):
    _check_refused(tmp_path / "missing.onnx")
    whole = write(tmp_path / "cut.onnx", DETECTOR, **describe())
    whole.write_bytes(whole.read_bytes()[:100])
    _check_refused(whole)
    _check_refused(write(tmp_path / "bare.onnx", DETECTOR))
    _check_refused(write(tmp_path / "other.onnx", ENCODER, **describe()))
    for change in _CHANGES:  # descriptions with other types
        _check_refused(write(tmp_path / "x.onnx", DETECTOR, **describe(**change)))


def test_a_shared_encoder_that_lacks_a_part_or_has_another_is_refused(tmp_path):
    for part in ("head_*", "enc*"):
        folder = write_shared(tmp_path / part[:3])
        for path in folder.glob(part):
            path.unlink()
        _check_refused(folder)
    with pytest.raises(UserError, match=r"other.*head_one\.onnx"):
        SharedEncoderModel(write_shared(tmp_path / "other", other="b"))
    for name, device in (("x.ts", None), ("x.pt2", None), ("x.pt2", "cuda"), ("x.onnx", "cuda:0")):
        (tmp_path / name).write_text("no archive")
        with pytest.raises(UserError):
            ExportedModel.open(tmp_path / name, device=device)


def test_other_images_and_failures_inside_are_errors(tmp_path):
    model = ExportedModel.open(write(tmp_path / "x.onnx", DETECTOR, **describe()), device="cpu")
    images = np.zeros((2, 4, 5, 3), np.uint8)
    for strange in (images[0], images[:0], images[:, :0], images[..., :2], images.astype(float)):
        with pytest.raises(ValueError, match="uint8"):
            model(strange)
    (found,) = model(images[:1])
    assert found.pred_boxes.tolist() == [[0, 0, 5, 4]]
    one_size = write(tmp_path / "one.onnx", DETECTOR, **describe(image_size=[4, 5]))
    model = ExportedModel.open(one_size, device="cpu")
    assert [len(found) for found in model(images)] == [1, 1]  # one at a time
    with pytest.raises(UserError, match=r"one\.onnx.*4 x 5"):
        model(images[:, :3])
    fails = ExportedModel(model.path, model.info, lambda images: {"boxes": images[9]})
    with pytest.raises(UserError, match=r"one\.onnx"):
        fails(images)


def write_constants(path, **changes):
    """Writes a detector that returns constants: a box of the class "dog" in any one image."""
    outputs = {
        "boxes": "float[1,1,4] {1, 2, 3, 4}",
        "scores": "float[1,1] {0.5}",
        "labels": "int64[1,1] {1}",
        "counts": "int64[1] {1}",
    } | changes
    types = ", ".join(f"{value.split()[0]} {name}" for name, value in outputs.items())
    lines = [f"{name} = Constant<value = {value}>()" for name, value in outputs.items()]
    body = "\n".join(lines)
    text = f"{_HEADER}detector (uint8[N,H,W,3] images) => ({types}) {{ {body} }}"
    return write(path, text, **describe())


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"counts": "int64[1] {-1}"}, "counts -1"),
        ({"counts": "int64[1] {2}"}, "counts 2"),
        ({"counts": "int64[1,1] {1}"}, "shapes"),
        ({"counts": "int64[2] {1, 1}"}, "shapes"),
        ({"counts": "float[1] {1}"}, "types"),
        ({"labels": "int64[1,1] {-1}"}, "classes -1"),
        ({"labels": "int64[1,1] {2}"}, "classes 2"),
        ({"labels": "float[1,1] {1}"}, "types"),
        ({"labels": "int64[1,2] {1, 1}"}, "shapes"),
        ({"boxes": "float[1,1,5] {1, 2, 3, 4, 5}"}, "shapes"),
        ({"boxes": "float[1,2,4] {1, 2, 3, 4, 1, 2, 3, 4}"}, "shapes"),
        ({"boxes": "float[1,1,4] {1, 2, 3, nan}"}, "finite"),
        ({"scores": "float[1,1] {nan}"}, "finite"),
    ],
)
def test_outputs_that_are_not_as_described_are_refused(tmp_path, changes, fault):
    images = np.zeros((1, 8, 8, 3), np.uint8)
    good = ExportedModel.open(write_constants(tmp_path / "good.onnx"), device="cpu")
    assert good(images)[0].pred_classes.tolist() == [1]
    bad = ExportedModel.open(write_constants(tmp_path / "bad.onnx", **changes), device="cpu")
    with pytest.raises(UserError, match=rf"bad\.onnx' .*{fault}"):
        bad(images)


def test_a_classifier_with_another_number_of_scores_than_names_is_refused(tmp_path):
    info = describe("classification", class_names=["red", "green"])
    model = ExportedModel.open(write(tmp_path / "x.onnx", CLASSIFIER, **info), device="cpu")
    with pytest.raises(UserError, match=r"x\.onnx' has scores \(1, 3\)"):
        model(np.ones((1, 4, 5, 3), np.uint8))


def test_the_program_in_the_docs_needs_onnxruntime_and_numpy_alone(tmp_path):
    write(tmp_path / "detector.onnx", DETECTOR, **describe())
    red = np.full((20, 40, 3), (255, 0, 0), np.uint8)
    save(tmp_path / "photo.jpg", red, orientation=6)  # as phones write 20 by 40 pixels
    page = (TOOLS.parent / "docs" / "export.md").read_text("utf-8")
    (program,) = (text for text in page.split("```") if text.startswith("python\nimport json"))
    # As on a machine without them: importing any of these fails.
    missing = (
        "import sys\nfor name in ('torch', 'detectron2', 'qbheat_det'): sys.modules[name] = None"
    )
    run = subprocess.run(
        [sys.executable, "-c", program.replace("python", missing, 1)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    name, score, box = run.stdout.split(maxsplit=2)
    assert (name, box.strip()) == ("dog", "[ 0.  0. 20. 40.]")
    assert float(score) > 0.98  # red is the first channel


def test_an_encoder_and_its_heads_are_one_model(tmp_path):
    folder, image = write_shared(tmp_path / "shared"), save_image(tmp_path / "0.png")
    model = SharedEncoderModel(folder, device="cpu")
    results = model(np.zeros((1, 96, 64, 3), np.uint8))
    assert results["one"][0].pred_boxes.tolist() == [[0, 0, 64, 96]]
    arguments = ["--weights", str(folder / "head_one.onnx"), "--json", str(tmp_path / "r.json")]
    assert PREDICT.main([*arguments, "--device", "cpu", "--images", image]) == 0
    (one,) = json.loads((tmp_path / "r.json").read_text())
    assert (one["file_name"], one["bbox"]) == ("0.png", [0, 0, 64, 96])
    with pytest.raises(UserError):
        ExportedModel.open(folder / "encoder.onnx")


def test_predict_gives_a_detector_its_pixel_format_and_category_ids(tmp_path):
    arguments = ["--images", save_image(tmp_path / "red.png"), "--json", str(tmp_path / "r.json")]
    arguments += ["--threshold", "0", "--device", "cpu", "--weights"]
    for pixel_format, score in (("RGB", 1.0), ("BGR", 0.0)):
        weights = write(tmp_path / "m.onnx", DETECTOR, **describe(pixel_format=pixel_format))
        assert PREDICT.main([*arguments, str(weights)]) == 0
        (found,) = json.loads((tmp_path / "r.json").read_text())
        assert (found["category_id"], found["bbox"]) == (9, [0, 0, 64, 96])
        assert found["score"] == pytest.approx(score)


def test_predict_names_the_classes_of_an_exported_classifier(tmp_path, capsys):
    weights = write(tmp_path / "m.onnx", CLASSIFIER, **describe("classification"))
    (tmp_path / "in").mkdir()
    save_image(tmp_path / "in" / "a.png", (10, 49, 141))
    (tmp_path / "in" / "b.png").write_text("no image")
    arguments = ["--weights", str(weights), "--images", str(tmp_path / "in"), "--device", "cpu"]
    assert PREDICT.main([*arguments, "--json", str(tmp_path / "r.json")]) == 1
    assert "b.png" in capsys.readouterr().err
    (found,) = json.loads((tmp_path / "r.json").read_text())
    assert [entry["name"] for entry in found["classes"]] == ["blue", "green", "red"]
    scores = [entry["score"] for entry in found["classes"]]
    np.testing.assert_allclose(scores, [141 / 200, 49 / 200, 10 / 200], rtol=1e-6)


def test_predict_refuses_what_an_exported_file_cannot_do(tmp_path, capsys):
    backbone = write(tmp_path / "b.onnx", ENCODER, **describe("features"))
    detector = write(tmp_path / "d.onnx", DETECTOR, **describe())
    arguments = ["--images", save_image(tmp_path / "a.png"), "--json", "r", "--device", "cpu"]
    overrides = ["INPUT.MIN_SIZE_TEST", "48"]
    for weights, more in ((backbone, []), (tmp_path / "none.onnx", []), (detector, overrides)):
        words = [*arguments, "--weights", str(weights), *more]
        assert str(weights) in refuse(PREDICT.main, words, capsys)

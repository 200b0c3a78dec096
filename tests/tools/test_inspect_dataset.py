# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/inspect_dataset.py from its command line: clean data, every error at once, wrong use."""

import io
import json
import logging
import shutil
import struct
from pathlib import Path

import pytest
from detectron2.structures import BoxMode
from PIL import ExifTags, Image

from qbheat_det.analysis import datasets
from qbheat_det.analysis.datasets import (
    DatasetSource,
    Inspection,
    draw_samples,
    inspect_dataset,
    list_sources,
    load_recipe,
    measure,
)
from qbheat_det.config import get_cfg, load_config
from qbheat_det.engine import RunFlags
from qbheat_det.engine.opened_sources import open_sources
from qbheat_det.tasks import DETECTION
from tests.tool_modules import load_tool, refuse
from tests.toy_set import draw_toy_set

TOOL = load_tool("inspect_dataset")

CONFIG = "quick_schedules/retinanet_small_cells.yaml"


@pytest.fixture(autouse=True)
def _logging_as_before():
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    for name in ("train", "val"):
        draw_toy_set(cache, 8, name=name)
    return cache


@pytest.fixture
def data(drawn, tmp_path):
    """A copy of two small sets: folders with annotations.json and images/."""
    folders = {}
    for name in ("train", "val"):
        source = next(drawn.glob(f"{name}_*"))
        folders[name] = Path(shutil.copytree(source, tmp_path / name))
    return folders


def change(folder, do):
    path = folder / "annotations.json"
    content = json.loads(path.read_text())
    do(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def inspect(data, tmp_path, capsys):
    """Runs the tool on both sets; returns the exit code and what it prints."""

    def run(*opts, **folders):
        words = ["--config-file", CONFIG, "--num-samples", "3", "--output", str(tmp_path / "out")]
        for flag, folder in zip(("--data", "--val"), {**data, **folders}.values(), strict=True):
            words += [flag, str(folder / "annotations.json")]
        return TOOL.main([*words, *opts]), capsys.readouterr().out

    return run


def test_clean_data_end_in_zero_with_numbers_counted_by_hand(inspect, data, tmp_path):
    code, text = inspect()
    assert code == 0
    assert "No errors." in text
    assert "advice: every image of 'train' has objects" in text
    assert "image of 'val'" not in text
    rows = {line[:24].strip(): line.split() for line in text.splitlines()}
    contents = [json.loads((f / "annotations.json").read_text()) for f in data.values()]
    assert rows["images"][1:] == ["8", "8"]
    assert rows["boxes"][1:] == [str(len(content["annotations"])) for content in contents]
    written = {"errors.txt", "left_out.txt", "samples.jpg"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == written
    assert "Used: " in text
    assert (tmp_path / "out" / "errors.txt").read_text() == ""


def test_boxes_are_counted_and_measured():
    def box(*xywh, k=0, **fields):
        return {"bbox": xywh, "bbox_mode": BoxMode.XYWH_ABS, "category_id": k, **fields}

    boxes = [box(0, 0, 20, 5), box(1, 1, 31, 31, k=1), box(0, 0, 150, 100, iscrowd=1),
             box(10, 20, 42, 52, bbox_mode=BoxMode.XYXY_ABS), box(0, 0, 96, 96, k=1)]  # fmt: skip
    records = [{"width": 200, "height": 100, "annotations": boxes}, {"width": 64, "height": 64}]
    cfg = get_cfg()
    cfg.INPUT.MIN_SIZE_TEST = 150
    found = Inspection(DatasetSource("a", "train"), records, ["cat", "dog", "cow"], [])
    assert found.boxes_per_class == {"cat": 2, "dog": 2, "cow": 0}
    assert measure(found, cfg) == {
        "images": "2",
        "images without boxes": "1",
        "boxes": "4",
        "crowd regions": "1",
        "boxes in an image": "2 (0 to 4)",
        "most boxes in an image / detections kept": "4 / 100",
        "box size (px)": "32 (13 to 86)",
        "box size (share of image)": "22.3 % (9.3 % to 61.1 %)",
        "small / medium / large": "50.0 % / 25.0 % / 25.0 %",  # 32 is medium, 96 is large
        "below 8 px at the input of evaluation": "25.0 %",  # 5 px become 7.5
    }
    empty = Inspection(found.source, [], [], [])
    assert measure(empty, cfg)["box size (px)"] == "none"
    assert draw_samples(empty, cfg, 3) is None


def write_yolo(folder, save):
    """Writes a YOLO data set of one image, which ``save`` writes to a path; returns its yaml."""
    for kind in ("images", "labels"):
        (folder / kind / "train").mkdir(parents=True)
    save(folder / "images" / "train" / "a.jpg")
    (folder / "labels" / "train" / "a.txt").write_text("0 0.5 0.5 0.5 0.5")
    (folder / "data.yaml").write_text("train: images/train\nnames: [square]")
    return folder / "data.yaml"


def save_with_thumbnail(path):
    """Writes a turned JPEG of 640 x 400 pixels with an EXIF thumbnail of 160 x 120."""
    thumbnail = io.BytesIO()
    Image.new("RGB", (160, 120), "blue").save(thumbnail, "JPEG")
    # Little-endian TIFF: IFD 0 at 8 with the orientation, and IFD 1 at 26 with the thumbnail at 56.
    first = struct.pack("<HHHIHHI", 1, 0x0112, 3, 1, 6, 0, 26)
    length = len(thumbnail.getvalue())
    second = struct.pack("<HHHIIHHIII", 2, 0x0201, 4, 1, 56, 0x0202, 4, 1, length, 0)
    exif = b"Exif\0\0II*\0" + struct.pack("<I", 8) + first + second + thumbnail.getvalue()
    Image.new("RGB", (640, 400), "red").save(path, exif=exif)
    with Image.open(path) as image:  # the thumbnail is where EXIF says
        offset = image.getexif().get_ifd(ExifTags.IFD.IFD1)[0x0201]
        assert image.info["exif"][6 + offset :][:length] == thumbnail.getvalue()


def save_two_pictures(path):
    """Writes an MPO of 400 x 640 pixels with a smaller second picture."""
    second = Image.new("RGB", (80, 60), "blue")
    Image.new("RGB", (400, 640), "red").save(path, "MPO", save_all=True, append_images=[second])


@pytest.mark.parametrize("save", [save_with_thumbnail, save_two_pictures])
def test_sizes_are_those_of_the_main_picture_of_a_file(save, tmp_path, monkeypatch):
    headings = []
    monkeypatch.setattr(datasets, "add_heading", lambda image, text: headings.append(text) or image)
    cfg = load_config(CONFIG)
    sources = open_sources(RunFlags(data=str(write_yolo(tmp_path, save))))
    (source,) = list_sources(cfg, RunFlags(), sources)
    found = inspect_dataset(source, cfg)
    assert found.errors == []
    assert [(one["width"], one["height"]) for one in found.records] == [(400, 640)]
    sheet = draw_samples(found, cfg, 1)
    assert headings == ["a.jpg: 400 x 640"]
    assert max(sheet.shape[:2]) < 640  # the picture itself is smaller after the augmentation


def test_without_a_config_the_recipe_of_training_is_used(data, tmp_path, capsys):
    path = data["train"] / "annotations.json"
    content = json.loads(path.read_text())
    assert {(image["width"], image["height"]) for image in content["images"]} == {(64, 64)}
    sides = [min(box["bbox"][2:]) for box in content["annotations"]]
    recipe = DETECTION.recipe
    size = load_config(recipe).INPUT
    words = ["--data", str(path), "--output", str(tmp_path / "out")]
    for opts, shortest in ([], size.MIN_SIZE_TEST), (["INPUT.MIN_SIZE_TEST", "32"], 32):
        assert TOOL.main([*words, *opts]) == 0
        lines = capsys.readouterr().out.splitlines()
        (line,) = [line for line in lines if recipe in line]
        assert f" {shortest} px" in line
        assert f" {size.MAX_SIZE_TEST} px" in line
        (row,) = [line for line in lines if line.startswith("below 8 px")]
        share = 100 * sum(side * shortest / 64 < 8 for side in sides) / len(sides)
        assert row.split()[-2:] == [f"{share:.1f}", "%"]


def test_a_given_config_is_used_and_named():
    cfg, name = load_recipe(RunFlags(data="x.json", config_file=CONFIG))
    assert (name, cfg.INPUT.MIN_SIZE_TEST) == (CONFIG, load_config(CONFIG).INPUT.MIN_SIZE_TEST)
    cfg, name = load_recipe(RunFlags(opts=["DATASETS.TRAIN", "('registered',)"]))
    assert (cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST) == (800, 1333)
    assert name == "Detectron2's defaults"


def test_every_error_is_found_at_once(inspect, data, tmp_path):
    images = sorted((data["train"] / "images").iterdir())
    images[0].unlink()
    images[1].write_bytes(images[1].read_bytes()[:-300])
    shutil.copy(images[6], data["val"] / "images" / "000002.jpg")

    def do(content):
        ids = {image["file_name"]: image["id"] for image in content["images"]}
        good = {"category_id": 1, "bbox": [1, 2, 9, 9], "image_id": ids[images[7].name]}
        content["annotations"] += [
            {**good, "iscrowd": 0, "id": 1001, "bbox": [64, 2, 9, 9]},
            {**good, "iscrowd": 0, "id": 1002, "category_id": 3},
        ]

    change(data["train"], do)
    code, text = inspect()
    assert code == 1
    lines = (tmp_path / "out" / "errors.txt").read_text().splitlines()
    expected = {
        "missing image that label files name": repr(images[0].name),
        "image with damaged pixels": images[1].name,
        "box outside of the image": "annotation id 1001",
        "box that cannot be read": "annotation id 1002",
        "image in training and evaluation": "000002.jpg",
    }
    assert len(lines) == len(expected)
    for kind, part in expected.items():
        assert f"  {kind}: 1" in text
        assert [line for line in lines if part in line], part
    assert (tmp_path / "out" / "samples.jpg").is_file()


def test_a_training_image_without_objects_needs_no_advice(inspect, data):
    def empty_one(content):
        image_id = content["images"][0]["id"]
        kept = [a for a in content["annotations"] if a["image_id"] != image_id]
        content["annotations"] = kept

    change(data["train"], empty_one)
    assert "advice" not in inspect("DATALOADER.FILTER_EMPTY_ANNOTATIONS", "False")[1]


def test_what_training_can_handle_is_a_warning(inspect, data):
    def drop_a_class(content):
        gone = content["annotations"][0]["category_id"]
        kept = [a for a in content["annotations"] if a["category_id"] != gone]
        content["annotations"] = kept

    change(data["val"], drop_a_class)
    code, text = inspect()
    assert (code, "warning: 'train' has boxes of" in text) == (0, True)
    code, text = inspect(val=data["train"])
    assert (code, "are the same data" in text) == (0, True)


def test_two_parts_of_one_data_yaml_are_not_the_same_data(tmp_path, capsys):
    for part, color in (("train", "red"), ("val", "blue")):
        for kind in ("images", "labels"):
            (tmp_path / kind / part).mkdir(parents=True)
        Image.new("RGB", (40, 20), color).save(tmp_path / "images" / part / f"{part}.png")
        (tmp_path / "labels" / part / f"{part}.txt").write_text("0 0.5 0.5 0.5 0.5")
    yaml = tmp_path / "data.yaml"
    yaml.write_text("train: images/train\nval: images/val\nnames: [square]")
    words = ["--config-file", CONFIG, "--num-samples", "1", "--output", str(tmp_path / "out")]
    assert TOOL.main([*words, "--data", str(yaml)]) == 0
    assert "same data" not in capsys.readouterr().out
    shutil.copy(tmp_path / "images/val/val.png", tmp_path / "images/train/copy.png")
    assert TOOL.main([*words, "--data", str(yaml)]) == 1
    assert "copy.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--images", "/"], "--data"),
        (["--data", "/nowhere/x.json", "--images", "/"], "/nowhere/x.json"),
        (["--config-file", CONFIG, "DATASETS.TRAIN", "('none',)"], "no dataset 'none'"),
        ([], "names no dataset"),
        (["--num-samples", "-1"], "--num-samples must be 0 or more"),
    ],
)
def test_wrong_use_ends_in_two(arguments, expected, capsys):
    assert expected in refuse(TOOL.main, arguments, capsys)

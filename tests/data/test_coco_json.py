# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Annotation files: what is found in good ones, and the sentence for every bad one."""

import gc
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    ToySpec,
    check_coco_json,
    check_same_classes,
    prepare_toy_set,
    register_coco_json,
)
from qbheat_det.data.datasets.coco import read_coco_json
from qbheat_det.data.datasets.toy import ANNOTATION_FILE, CATEGORY_IDS
from qbheat_det.data.datasets.toy_scenes import CLASS_NAMES
from tests.data.coco_content import GOOD, Content, changed, sentence, with_annotation, write


def test_a_good_file_is_summarised_by_hand_count(tmp_path: Path) -> None:
    json_file, image_root = write(tmp_path, GOOD)
    summary = check_coco_json(json_file, image_root)
    assert summary.json_file == json_file
    assert summary.class_names == ("dog", "cat")
    assert summary.category_ids == (2, 9)
    assert (summary.num_images, summary.num_boxes, summary.num_crowds) == (3, 2, 1)
    assert summary.num_images_without_boxes == 2
    assert summary.warnings == ()


def test_the_toy_set_passes_and_has_detectron2s_class_order(tmp_path: Path) -> None:
    folder = prepare_toy_set(ToySpec(name="check", num_images=30), tmp_path)
    summary = check_coco_json(folder / ANNOTATION_FILE, folder / "images")
    raw = json.loads((folder / ANNOTATION_FILE).read_text())
    assert summary.class_names == CLASS_NAMES
    assert summary.category_ids == CATEGORY_IDS
    assert summary.num_boxes == len(raw["annotations"])
    with_boxes = {annotation["image_id"] for annotation in raw["annotations"]}
    assert summary.num_images_without_boxes == 30 - len(with_boxes) > 0
    assert summary.warnings == ()


def test_reading_leaves_garbage_collection_as_it_was(tmp_path: Path) -> None:
    paths = write(tmp_path, GOOD)
    check_coco_json(*paths)
    assert gc.isenabled()
    gc.disable()
    try:
        check_coco_json(*paths)
        assert not gc.isenabled()
    finally:
        gc.enable()


BAD_CONTENTS: dict[str, tuple[Callable[[Content], object], list[str]]] = {
    "no_images_key": (lambda c: c.pop("images"), ["'images' is missing"]),
    "no_annotations_key": (lambda c: c.pop("annotations"), ["'annotations' is missing"]),
    "no_categories_key": (lambda c: c.pop("categories"), ["'categories' is missing"]),
    "images_as_object": (lambda c: c.update(images={}), ["'images' must be a list"]),
    "image_as_text": (lambda c: c["images"].append("d.jpg"), ["images[3]", "one image"]),
    "images_empty": (lambda c: c.update(images=[]), ["'images' is empty"]),
    "categories_empty": (lambda c: c.update(categories=[]), ["'categories' is empty"]),
    "no_annotations": (lambda c: c.update(annotations=[]), ["no box"]),
    "only_crowds": (lambda c: c.update(annotations=c["annotations"][2:]), ["no box"]),
    "image_id_twice": (lambda c: c["images"][1].update(id=10), ["image id 10", "more than once"]),
    "category_id_twice": (
        lambda c: c["categories"][1].update(id=9),
        ["category id 9", "more than once"],
    ),
    "category_without_name": (
        lambda c: c["categories"][1].pop("name"),
        ["category id 2", "name must be a text, but is missing"],
    ),
    "category_of_half_a_character": (
        lambda c: c["categories"][0].update(name="c\ud83d"),
        ["category id 9", "half a character"],
    ),
    "image_id_too_large": (
        lambda c: c["images"][2].update(id=2**53 + 1),
        ["image id 9007199254740993", "below 2**53"],
    ),
    "width_endless": (lambda c: c["images"][0].update(width=10**400), ["image id 10", "width"]),
    "width_missing": (lambda c: c["images"][1].pop("width"), ["image id 3", "width", "missing"]),
    "height_as_text": (lambda c: c["images"][1].update(height="60"), ["image id 3", "height"]),
    "height_zero": (lambda c: c["images"][1].update(height=0), ["image id 3", "height", "is 0"]),
    "file_name_missing": (lambda c: c["images"][0].pop("file_name"), ["image id 10", "file_name"]),
    "bbox_missing": (lambda c: c["annotations"][1].pop("bbox"), ["annotation id 2", "missing"]),
    "relative_boxes": (
        lambda c: [a.update(bbox=[0.1, 0.2, 0.5, 0.25]) for a in c["annotations"]],
        ["between 0 and 1", "pixels"],
    ),
}


@pytest.mark.parametrize("case", BAD_CONTENTS)
def test_a_bad_file_is_explained(case: str, tmp_path: Path) -> None:
    change, expected = BAD_CONTENTS[case]
    text = sentence(tmp_path, changed(change))
    for part in expected:
        assert part in text


def test_a_missing_annotation_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json' does not exist"):
        check_coco_json(tmp_path / "none.json", tmp_path)


@pytest.mark.parametrize("content", [b"{not json", b"", b"\xff\xfe\x00\x01"])
def test_a_file_that_is_not_json_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "set.json").write_bytes(content)
    with pytest.raises(UserError, match=r"set\.json is not JSON"):
        check_coco_json(tmp_path / "set.json", tmp_path)


def test_a_list_of_results_is_not_an_annotation_file(tmp_path: Path) -> None:
    assert "top level must be an object" in sentence(tmp_path, [{"image_id": 1}])


def test_a_missing_image_folder_is_named(tmp_path: Path) -> None:
    json_file, _ = write(tmp_path, GOOD)
    with pytest.raises(UserError, match=r"image folder '.*nowhere'"):
        check_coco_json(json_file, tmp_path / "nowhere")


def test_missing_images_are_named_and_counted(tmp_path: Path) -> None:
    names = ["d.jpg", "none/e.jpg", "sub/f.jpg", "a.jpg/g.jpg"]
    extra = [
        {"id": 100 + i, "file_name": name, "width": 9, "height": 9} for i, name in enumerate(names)
    ]
    text = sentence(tmp_path, changed(lambda content: content["images"].extend(extra)))
    assert "image id 100: there is no file 'd.jpg' in " in text
    assert "(3 of 7 files are there)" in text
    assert text.endswith("(3 more like it)")


def test_images_are_found_by_absolute_path_and_through_links(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.jpg").touch()
    _, image_root = write(tmp_path, GOOD)
    (Path(image_root) / "link").symlink_to(elsewhere)

    def change(content: Content) -> None:
        content["images"][0]["file_name"] = str(elsewhere / "x.jpg")
        content["images"][1]["file_name"] = "link/x.jpg"
        content["images"][2]["file_name"] = "../elsewhere/x.jpg"

    assert check_coco_json(*write(tmp_path, changed(change))).num_images == 3


def test_how_many_annotations_are_wrong_is_said(tmp_path: Path) -> None:
    def change(content: Content) -> None:
        for annotation in content["annotations"]:
            annotation["bbox"] = [200, 2, 3, 4]

    assert "annotation id 1: " in sentence(tmp_path, changed(change))
    assert "(2 more like it)" in sentence(tmp_path, changed(change))


def test_every_fault_is_found_at_once_and_only_what_is_sound_stays(tmp_path: Path) -> None:
    def spoil(content: Content) -> None:
        content["images"] += [
            {"id": 8, "file_name": "none.jpg", "width": 9, "height": 9},
            {"id": 9, "file_name": "a.jpg", "width": 9.5, "height": 9},
            "text",
        ]
        fields: list[Content] = [
            {"bbox": [200, 2, 3, 4]},
            {"bbox": [1, 2, 3]},
            {"category_id": 77},
            {"image_id": 8},  # of an image that is at fault itself: no fault of its own
            {"image_id": 99},
            {"iscrowd": 5},
        ]
        good = content["annotations"][1]
        content["annotations"] += [{**good, "id": 20 + i, **f} for i, f in enumerate(fields)]
        content["annotations"].append(dict(good))

    content = read_coco_json(*write(tmp_path, changed(spoil)))
    where = [fault.where.split("set.json: ")[1] for fault in content.errors]
    assert sorted(where) == [
        "annotation id 2",
        *(f"annotation id {20 + i}" for i in (0, 1, 2, 4, 5)),
        "image id 8",
        "image id 9",
        "images[5]",
    ]
    assert {image["id"] for image in content.images} == {10, 3, 7}
    assert {annotation["id"] for annotation in content.annotations} == {1, 2, 5}


WARNINGS: dict[str, tuple[Callable[[Content], object], str, int]] = {
    "clipped": (with_annotation(bbox=[-3, 0, 20, 9]), "1 annotations have a box beyond", 2),
    "file_named_twice": (
        lambda c: c["images"][1].update(file_name="a.jpg"),
        "1 image file names occur more than once: 'a.jpg'",
        2,
    ),
    "two_points": (with_annotation(segmentation=[[1, 1, 2, 2]]), "no polygon of three points", 1),
    "id_zero": (with_annotation(id=0), "annotation id 0 means 'no match'", 2),
    "same_name": (lambda c: c["categories"][0].update(name="dog"), "occur more than once", 2),
    "unused_class": (
        lambda c: c["categories"].append({"id": 1, "name": "bird"}),
        "1 of 3 categories have no box: 'bird'",
        2,
    ),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_what_training_copes_with_is_a_warning(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, expected, num_boxes = WARNINGS[case]
    with caplog.at_level(logging.WARNING, logger="qbheat_det"):
        logging.getLogger("qbheat_det").addHandler(caplog.handler)
        try:
            summary = check_coco_json(*write(tmp_path, changed(change)))
        finally:
            logging.getLogger("qbheat_det").removeHandler(caplog.handler)
    assert any(expected in warning for warning in summary.warnings)
    assert expected in caplog.text
    assert summary.num_boxes == num_boxes


def test_a_registered_file_loads_with_contiguous_classes(tmp_path: Path) -> None:
    json_file, image_root = write(tmp_path, GOOD)
    name = "qbheat_test_registered_file"
    try:
        register_coco_json(name, json_file, image_root)
        register_coco_json(name, Path(json_file), Path(image_root))
        dataset = DatasetCatalog.get(name)
        assert [record["image_id"] for record in dataset] == [3, 7, 10]
        assert [a["category_id"] for a in dataset[2]["annotations"]] == [1, 0]
        summary = check_coco_json(json_file, image_root)
        assert tuple(MetadataCatalog.get(name).thing_classes) == summary.class_names
        assert MetadataCatalog.get(name).evaluator_type == "coco"
        with pytest.raises(UserError, match=name):
            register_coco_json(name, json_file, tmp_path)
    finally:
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)


def test_a_relative_path_still_holds_after_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, GOOD)
    name = "qbheat_test_relative_path"
    monkeypatch.chdir(tmp_path)
    try:
        register_coco_json(name, "set.json", "images")
        monkeypatch.chdir("/")
        assert len(DatasetCatalog.get(name)) == 3
    finally:
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)


def test_equal_classes_with_other_ids_are_the_same_classes(tmp_path: Path) -> None:
    train = check_coco_json(*write(tmp_path / "train", GOOD))

    def renumber(content: Content) -> None:
        content["categories"] = [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}]
        for annotation in content["annotations"]:
            annotation["category_id"] = 1

    val = check_coco_json(*write(tmp_path / "val", changed(renumber)))
    check_same_classes(train, val)
    assert train.category_ids != val.category_ids


@pytest.mark.parametrize(
    ("categories", "expected"),
    [
        ({9: "cat", 2: "wolf"}, r"val/set\.json' lacks 'dog'"),
        ({9: "cat", 2: "dog", 3: "cow"}, r"train/set\.json' lacks 'cow'"),
        ({9: "dog", 2: "cat"}, "another order of ids: 'dog', 'cat' against 'cat', 'dog'"),
    ],
)
def test_different_classes_are_explained(
    categories: dict[int, str], expected: str, tmp_path: Path
) -> None:
    train = check_coco_json(*write(tmp_path / "train", GOOD))
    rows = [{"id": id_, "name": name} for id_, name in categories.items()]
    val = check_coco_json(*write(tmp_path / "val", changed(lambda c: c.update(categories=rows))))
    with pytest.raises(UserError, match=expected):
        check_same_classes(train, val)

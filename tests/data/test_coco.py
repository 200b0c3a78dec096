# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO's format: what is read, what is left out, and that every bad entry is named by its id."""

import copy
import json
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pycocotools.mask
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    Source,
    check_same_classes,
    open_source,
    read_annotations,
    register_coco_json,
    register_source,
)
from qbheat_det.data.datasets import register_builtin_sets
from qbheat_det.data.datasets.registration import forget_source, register_coco_images

NAME = "qbheat_test_of_coco"
GOOD = {
    "images": [
        {"id": 10, "file_name": "a.jpg", "width": 100, "height": 50},
        {"id": 3, "file_name": "sub/b.jpg", "width": 40, "height": 60},
        {"id": 7, "file_name": "c.jpg", "width": 40, "height": 60},
    ],
    "annotations": [
        {"id": 1, "image_id": 10, "category_id": 9, "bbox": [5, 5.5, 20, 30], "iscrowd": 0},
        {"id": 2, "image_id": 10, "category_id": 2, "bbox": [-0.5, 0, 101, 50]},
        {"id": 5, "image_id": 3, "category_id": 9, "bbox": [1, 1, 9, 9], "iscrowd": 1},
    ],
    "categories": [{"id": 9, "name": "cat"}, {"id": 2, "name": "dog"}],
}


@pytest.fixture(autouse=True)
def _clean():
    yield
    forget_source(NAME)


def write(folder, content):
    """Writes an annotation file and GOOD's images; returns the two paths."""
    (folder / "images" / "sub").mkdir(parents=True, exist_ok=True)
    for image in GOOD["images"]:
        (folder / "images" / image["file_name"]).touch()
    (folder / "set.json").write_text(json.dumps(content))
    return str(folder / "set.json"), str(folder / "images")


def changed(change):
    content = copy.deepcopy(GOOD)
    change(content)
    return content


def read(folder, content=GOOD):
    """Returns the annotations of a content."""
    json_file, image_root = write(folder, content)
    return read_annotations(Source("coco", json_file, image_root=image_root))


def annotation(**fields):
    """A change of the second annotation, which has id 2 and lies in image 10."""
    return lambda content: content["annotations"][1].update(fields)


def entry(key, position, **fields):
    return lambda content: content[key][position].update(fields)


# What the message must name besides the file, and the changes of which each must be named so.
FATAL = [
    *((f"'{key}'", lambda c, key=key: c.pop(key)) for key in GOOD),
    ("'images'", lambda c: c.update(images={})),
    ("'images' is empty", lambda c: c.update(images=[])),
    ("'categories' is empty", lambda c: c.update(categories=[])),
    ("no boxes", lambda c: c.update(annotations=[])),
    ("no boxes", lambda c: c.update(annotations=c["annotations"][2:])),  # only crowds
    ("category id 9", entry("categories", 1, id=9)),
    ("category number 1: id", entry("categories", 0, id="nine")),
    *(("category id 2: name", entry("categories", 1, name=n)) for n in (None, 3)),
    ("between 0 and 1", lambda c: [a.update(bbox=[0.1, 0.2, 0.5, 0.25]) for a in c["annotations"]]),
]


@pytest.mark.parametrize(("named", "change"), FATAL)
def test_a_file_without_usable_lists_is_refused(named, change, tmp_path):
    with pytest.raises(UserError, match=re.escape(named)) as caught:
        read(tmp_path, changed(change)).check()
    assert "set.json" in str(caught.value)
    assert "\n" not in str(caught.value)


LEFT_OUT = [
    ("image number 4", lambda c: c["images"].append("d.jpg")),
    ("image id 10", entry("images", 1, id=10)),
    ("image number 3", entry("images", 2, id=2**53 + 1)),
    ("image number 3", entry("images", 2, id=None)),
    ("image id 10: there is no image 'd.jpg'", entry("images", 0, file_name="d.jpg")),
    ("image id 10: its file_name", entry("images", 0, file_name=None)),
    *((f"annotation id {id_!r}", annotation(id=id_, bbox=None)) for id_ in ("2", 2**53, 1)),
    *(("id 2: image_id", annotation(image_id=id_)) for id_ in (10**400, 11, [3])),
    *(("id 2: category_id", annotation(category_id=id_)) for id_ in (1, True)),
    ("annotation id 2: iscrowd", annotation(iscrowd=2)),
    *(
        ("annotation id 2: bbox", annotation(bbox=value))
        for value in (
            *(None, [1, 2, 3], ["1", "2", "3", "4"], [1, 2, None, 4], [1, 2, 10**400, 4]),
            *([1, 2, float("nan"), 4], [1, 2, float("inf"), 4]),
        )
    ),
    ("annotation id 2: its width or height is negative", annotation(bbox=[9, 9, -3, 4])),
    ("annotation id 2: its width or height is 0", annotation(bbox=[9, 9, 0, 4])),
    *(
        ("annotation id 2: its centre lies outside", annotation(bbox=box))
        for box in ([100, 9, 3, 4], [5, -9, 3, 9])
    ),
]


@pytest.mark.parametrize(("named", "change"), LEFT_OUT)
def test_a_bad_entry_is_left_out_and_named_with_its_file_and_id(named, change, tmp_path):
    account = read(tmp_path, changed(change)).account
    assert any(named in one.message and "set.json" in one.message for one in account.faults)


def test_files_and_folders_that_cannot_be_read_are_named(tmp_path):
    json_file, image_root = write(tmp_path, GOOD)
    with pytest.raises(UserError, match=r"none\.json"):
        open_source(str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="nowhere"):
        read_annotations(Source("coco", json_file, image_root=str(tmp_path / "nowhere")))
    for content in (b"{not json", b"", b"\xff\xfe\x00\x01", b"[]", b'{"images": 1}'):
        Path(json_file).write_bytes(content)
        with pytest.raises(UserError, match=r"set\.json"):
            open_source(json_file, image_root)


def test_all_faults_are_found_at_once_and_only_what_is_sound_stays(tmp_path):
    def spoil(content):
        content["images"] += [
            {"id": 8, "file_name": "none.jpg", "width": 9, "height": 9},
            "text",
        ]
        fields = [
            {"bbox": [200, 2, 3, 4]},
            {"bbox": [1, 2, 3]},
            {"category_id": 77},
            {"image_id": 8},  # of an image with a fault itself: no further fault
            {"image_id": 99},
            {"iscrowd": 5},
        ]
        good = content["annotations"][1]
        content["annotations"] += [{**good, "id": 20 + i, **f} for i, f in enumerate(fields)]

    content = read(tmp_path, changed(spoil))
    where = [fault.where.split("set.json: ")[1] for fault in content.account.faults]
    assert sorted(where) == [
        *(f"annotation id {20 + i}" for i in (0, 1, 2, 4, 5)),
        *("image id 8", "image number 5"),
    ]
    assert {image["id"] for image in content.images} == {10, 3, 7}
    assert {entry["id"] for entry in content.annotations} == {1, 2, 5}
    assert content.account.used == {"image": 3, "box": 3, "label file": 1}
    assert content.account.count("box") == 9
    with pytest.raises(UserError, match=r"2 images of 5.*none\.jpg"):
        content.account.check(0.1)
    with pytest.raises(UserError, match=r"5 boxes of 8"):
        content.account.check(0.5)
    content.account.check(0.7)


def test_ids_that_occur_twice_are_replaced(tmp_path):
    content = read(tmp_path, changed(annotation(id=1)))
    assert [one["id"] for one in content.annotations] == [1, 2, 3]
    assert any("twice" in note for note in content.account.notes)
    assert not content.original
    names = {10: "a", 3: "b", 7: "c"}

    def rename(content):
        for one in (*content["images"], *content["annotations"]):
            key = "image_id" if "image_id" in one else "id"
            one[key] = names[one[key]]

    content = read(tmp_path, changed(rename))
    assert [image["id"] for image in content.images] == [1, 2, 3]
    assert [one["image_id"] for one in content.annotations] == [1, 1, 2]


def test_several_entries_of_one_image_are_joined(tmp_path):
    def repeat(content):
        content["images"].append({**content["images"][0], "id": 11})
        content["annotations"][1]["image_id"] = 11

    content = read(tmp_path, changed(repeat))
    assert [image["id"] for image in content.images] == [10, 3, 7]
    assert [one["image_id"] for one in content.annotations] == [10, 10, 3]
    assert any("joined" in note for note in content.account.notes)


def test_boxes_given_as_corners_are_known_by_their_areas(tmp_path):
    boxes = [[5, 5, 25, 35], [10, 5, 90, 45], [1, 1, 10, 10]]

    def corners(content, areas=True):
        for one, box in zip(content["annotations"], boxes, strict=True):
            x, y, right, bottom = one["bbox"] = box
            one["area"] = (right - x) * (bottom - y) if areas else None

    content = read(tmp_path, changed(corners))
    expected = [[5, 5, 20, 30], [10, 5, 80, 40], [1, 1, 9, 9]]
    assert [one["bbox"] for one in content.annotations] == expected
    assert any("corners" in note for note in content.account.notes)
    boxes[1] = [30, 20, 95, 45]  # beyond the image as a size, inside as a corner
    with pytest.raises(UserError, match=r"set\.json.*corners"):
        read(tmp_path, changed(lambda content: corners(content, areas=False)))

    def sizes(content):
        for one in content["annotations"]:
            one["area"] = one["bbox"][2] * one["bbox"][3]

    unchanged = [one["bbox"] for one in read(tmp_path).annotations]
    assert [one["bbox"] for one in read(tmp_path, changed(sizes)).annotations] == unchanged


def test_clipped_boxes_and_classes_without_a_box_are_told(tmp_path):
    content = read(tmp_path, changed(annotation(bbox=[-3, 2, 9, 5])))
    assert content.annotations[1]["bbox"] == [0, 2, 6, 5]
    assert len(content.account.clipped) == 1
    assert "id 2" in content.account.clipped[0]
    content = read(tmp_path)  # up to 1.5 pixels are the rounding of a tool
    assert content.annotations[1]["bbox"] == [-0.5, 0, 101, 50]
    assert not content.account.clipped
    for names, named in (
        ({"id": 1, "name": "bird"}, "'bird'"),
        ({"id": 1, "name": "Dog "}, "'Dog ', 'dog'"),
    ):
        content = read(tmp_path, changed(lambda c, new=names: c["categories"].append(new)))
        assert any(named in note for note in content.account.notes)


@pytest.mark.parametrize(
    "value",
    [
        *("text", [["1"] * 6], [[1, 1, 5, float("nan"), 5, 5]], [[1, 1, 5, 1, 5, 1e7]]),
        *([1, 1, 5, 1, 5, 5], [[1, 1, 2, 2]], {"counts": "x"}),
        *({"counts": [5000], "size": [100, 50]}, {"counts": [9], "size": [50, 100]}),
        {"counts": "@@!", "size": [50, 100]},
    ],
)
def test_a_mask_that_cannot_be_drawn_costs_only_the_mask(value, tmp_path):
    content = read(tmp_path, changed(annotation(segmentation=value)))
    assert len(content.annotations) == 3
    assert "segmentation" not in content.annotations[1]
    assert any("masks" in note for note in content.account.notes)


def test_masks_that_pycocotools_writes_pass_and_shortened_ones_do_not(tmp_path):
    for seed in range(4):
        random = np.random.default_rng(seed)
        pixels = random.random((50, 100)) < (0.0, 0.01, 0.5, 1.0)[seed]
        encoded = pycocotools.mask.encode(np.asfortranarray(pixels, dtype=np.uint8))
        rle = {"counts": encoded["counts"].decode(), "size": [50, 100]}
        kept = read(tmp_path, changed(annotation(segmentation=rle))).annotations[1]
        assert kept["segmentation"] == rle
        shorter = {**rle, "counts": rle["counts"][:-1]}
        kept = read(tmp_path, changed(annotation(segmentation=shorter))).annotations[1]
        assert "segmentation" not in kept


def test_a_sound_file_is_registered_as_it_is(tmp_path):
    json_file, image_root = write(tmp_path, GOOD)
    register_source(NAME, Source("coco", json_file, image_root=image_root))
    assert MetadataCatalog.get(NAME).json_file == json_file
    write(tmp_path, changed(annotation(bbox=[-3, 2, 9, 5])))
    register_source(NAME, Source("coco", json_file, image_root=image_root))
    assert MetadataCatalog.get(NAME).json_file != json_file


def test_a_registered_file_loads_from_any_folder_with_contiguous_classes(tmp_path, monkeypatch):
    json_file, image_root = write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    register_coco_json(NAME, "set.json", "images")
    register_coco_json(NAME, Path(json_file), Path(image_root))
    monkeypatch.chdir("/")
    dataset = DatasetCatalog.get(NAME)
    assert [record["image_id"] for record in dataset] == [3, 7, 10]
    assert [a["category_id"] for a in dataset[2]["annotations"]] == [1, 0]
    assert tuple(MetadataCatalog.get(NAME).thing_classes) == ("dog", "cat")
    with pytest.raises(UserError, match=NAME):
        register_coco_json(NAME, json_file, tmp_path)
    with pytest.raises(UserError, match=NAME):
        register_coco_images(NAME, json_file, image_root)


def test_classes_are_compared_by_name_and_order(tmp_path):
    train = read(tmp_path / "train")
    for categories, named in (
        ({1: "dog", 2: "cat"}, ""),
        ({9: "cat", 2: "wolf"}, r"val/set\.json' lacks 'dog'"),
        ({9: "cat", 2: "dog", 3: "cow"}, r"train/set\.json' lacks 'cow'"),
        ({9: "dog", 2: "cat"}, "'dog', 'cat' against 'cat', 'dog'"),
    ):
        content = copy.deepcopy(GOOD)
        content["categories"] = [{"id": id_, "name": name} for id_, name in categories.items()]
        for entry in content["annotations"]:
            entry["category_id"] = 2
        val = read(tmp_path / "val", content)
        with pytest.raises(UserError, match=named) if named else nullcontext():
            check_same_classes(train, val)


def test_images_alone_come_by_id_and_are_read_when_they_are_loaded(tmp_path):
    register_coco_images(NAME, tmp_path / "set.json", tmp_path / "images")
    register_coco_images(NAME, tmp_path / "set.json", tmp_path / "images")
    assert not (tmp_path / "set.json").exists()
    images = [{"id": 7, "file_name": "c.jpg"}, {"id": 3, "file_name": "a.jpg"}]
    write(tmp_path, {"images": images})
    assert DatasetCatalog.get(NAME) == [
        {"file_name": str(tmp_path / "images" / "a.jpg"), "image_id": 3},
        {"file_name": str(tmp_path / "images" / "c.jpg"), "image_id": 7},
    ]
    assert MetadataCatalog.get(NAME).unlabelled
    with pytest.raises(UserError, match=NAME):
        register_coco_json(NAME, tmp_path / "set.json", tmp_path / "images")


def test_the_builtin_names_are_registered_without_touching_a_file():
    register_builtin_sets()  # again, as by a second import: nothing happens
    for split in ("train", "val"):
        (folder,) = MetadataCatalog.get(f"imagenet_{split}").image_folders
        assert folder.endswith(f"imagenet/{split}")
        for name in (f"coco_2017_{split}", f"cells_sample_{split}"):
            images, annotated = MetadataCatalog.get(f"{name}_images"), MetadataCatalog.get(name)
            assert images.unlabelled
            assert Path(images.json_file) == Path(annotated.json_file).absolute()


@pytest.mark.parametrize(("part", "number"), [("train", 48), ("val", 40)])
def test_the_shipped_cells_are_loaded_without_their_boxes(part, number):
    records = DatasetCatalog.get(f"cells_sample_{part}_images")
    assert len(records) == number
    assert set(records[0]) == {"file_name", "image_id"}
    assert all(Path(record["file_name"]).is_file() for record in records)

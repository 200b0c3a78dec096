# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Annotation files: what good ones hold, and that every bad entry is named by file and id."""

import copy
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pycocotools.mask
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from qbheat_det.data.datasets.coco_file import has_area, has_polygon

from qbheat_det.core.errors import UserError
from qbheat_det.data import CocoFile, check_same_classes, register_coco_json
from qbheat_det.data.datasets import register_builtin_sets
from qbheat_det.data.datasets.sources import register_coco_images

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


def annotation(**fields):
    """A change of the second annotation, which has id 2 and lies in image 10."""
    return lambda content: content["annotations"][1].update(fields)


def find_message(folder, change):
    with pytest.raises(UserError) as caught:
        CocoFile(*write(folder, changed(change))).check()
    text = str(caught.value)
    assert "set.json" in text
    assert "\n" not in text
    return text


def entry(key, position, **fields):
    return lambda content: content[key][position].update(fields)


# What the message must name besides the file, and the changes of which each must be named so.
BAD = [
    *((f"'{key}'", lambda c, key=key: c.pop(key)) for key in GOOD),
    ("'images'", lambda c: c.update(images={})),
    ("'categories' is empty", lambda c: c.update(categories=[])),
    ("image number 4", lambda c: c["images"].append("d.jpg")),
    ("no box", lambda c: c.update(annotations=[])),
    ("no box", lambda c: c.update(annotations=c["annotations"][2:])),  # only crowds
    ("image id 10", entry("images", 1, id=10)),
    ("image id 90071", entry("images", 2, id=2**53 + 1)),
    *(("image id 10: width", entry("images", 0, width=w)) for w in (10**400, None, "60", 0, 9.5)),
    *(("image id 10: ", entry("images", 0, file_name=n)) for n in (None, "d.jpg", "a.jpg/g.jpg")),
    ("category id 9", entry("categories", 1, id=9)),
    *(("category id 2: name", entry("categories", 1, name=n)) for n in (None, 3)),
    ("relative", lambda c: [a.update(bbox=[0.1, 0.2, 0.5, 0.25]) for a in c["annotations"]]),
    ("annotation number 2: id", annotation(id=None)),
    *((f"annotation id {id_!r}", annotation(id=id_)) for id_ in ("2", 2**53, 1)),
    *(("id 2: image_id", annotation(image_id=id_)) for id_ in (10**400, 11, [3])),
    *(("id 2: category_id", annotation(category_id=id_)) for id_ in (1, True)),
    ("annotation id 2: iscrowd", annotation(iscrowd=2)),
    ("annotation id 2: ignore", annotation(ignore=1)),
    *(
        ("annotation id 2: bbox", annotation(bbox=value))
        for value in (
            *(None, [1, 2, 3], ["1", "2", "3", "4"], [1, 2, None, 4], [1, 2, 10**400, 4]),
            *([1, 2, float("nan"), 4], [1, 2, float("inf"), 4]),
            *([9, 9, -3, 4], [100, 9, 3, 4], [5, -9, 3, 9]),
        )
    ),
    *(
        ("annotation id 2: segm", annotation(segmentation=value))
        for value in (
            *("text", [["1"] * 6], [[1, 1, 5, float("nan"), 5, 5]], [[1, 1, 5, 1, 5, 1e7]]),
            [1, 1, 5, 1, 5, 5],
            *({"counts": [5000], "size": [100, 50]}, {"counts": [9], "size": [50, 100]}),
            *({"counts": "@@!", "size": [50, 100]}, {"counts": "x"}),
        )
    ),
]


@pytest.mark.parametrize(("named", "change"), BAD)
def test_a_bad_entry_is_named_with_its_file_and_id(named, change, tmp_path):
    assert named in find_message(tmp_path, change)


def test_files_and_folders_that_cannot_be_read_are_named(tmp_path):
    json_file, image_root = write(tmp_path, GOOD)
    with pytest.raises(UserError, match=r"none\.json"):
        CocoFile(str(tmp_path / "none.json"), str(tmp_path))
    with pytest.raises(UserError, match="nowhere"):
        CocoFile(json_file, str(tmp_path / "nowhere"))
    for content in (b"{not json", b"", b"\xff\xfe\x00\x01", b"[]", b'[{"image_id": 1}]'):
        Path(json_file).write_bytes(content)
        with pytest.raises(UserError, match=r"set\.json"):
            CocoFile(json_file, image_root)


def test_all_errors_are_found_at_once_and_only_what_is_sound_stays(tmp_path):
    def spoil(content):
        content["images"] += [
            {"id": 8, "file_name": "none.jpg", "width": 9, "height": 9},
            {"id": 9, "file_name": "a.jpg", "width": 9.5, "height": 9},
            "text",
        ]
        fields = [
            {"bbox": [200, 2, 3, 4]},
            {"bbox": [1, 2, 3]},
            {"category_id": 77},
            {"image_id": 8},  # of an image with an error itself: no further error
            {"image_id": 99},
            {"iscrowd": 5},
        ]
        good = content["annotations"][1]
        content["annotations"] += [{**good, "id": 20 + i, **f} for i, f in enumerate(fields)]
        content["annotations"].append(dict(good))

    content = CocoFile(*write(tmp_path, changed(spoil)))
    where = [error.where.split("set.json: ")[1] for error in content.errors]
    assert sorted(where) == [
        "annotation id 2",
        *(f"annotation id {20 + i}" for i in (0, 1, 2, 4, 5)),
        *("image id 8", "image id 9", "image number 6"),
    ]
    assert {image["id"] for image in content.images} == {10, 3, 7}
    assert {entry["id"] for entry in content.annotations} == {1, 2, 5}
    assert "8 more" in find_message(tmp_path, spoil)


WARNINGS = {
    "no polygon": (annotation(segmentation=[[1, 1, 2, 2]]), 1),
    "without area": (annotation(bbox=[1, 2, 0, 5]), 1),
    "beyond their image": (annotation(bbox=[-3, 2, 9, 5]), 2),
    "category names": (entry("categories", 0, name="dog"), 2),
    "'bird'": (lambda c: c["categories"].append({"id": 1, "name": "bird"}), 2),
}


@pytest.mark.parametrize("named", WARNINGS)
def test_what_detectron2_copes_with_is_a_warning(named, tmp_path):
    change, num_boxes = WARNINGS[named]
    summary = CocoFile(*write(tmp_path, changed(change)))
    assert named in summary.warnings[0]
    usable = [a for a in summary.annotations if has_area(a) and has_polygon(a)]
    assert sum(not a.get("iscrowd", 0) for a in usable) == num_boxes


def test_masks_that_pycocotools_writes_pass_and_shortened_ones_do_not(tmp_path):
    for seed in range(4):
        random = np.random.default_rng(seed)
        pixels = random.random((50, 100)) < (0.0, 0.01, 0.5, 1.0)[seed]
        encoded = pycocotools.mask.encode(np.asfortranarray(pixels, dtype=np.uint8))
        rle = {"counts": encoded["counts"].decode(), "size": [50, 100]}
        assert not CocoFile(*write(tmp_path, changed(annotation(segmentation=rle)))).errors
        shorter = {**rle, "counts": rle["counts"][:-1]}
        assert "annotation id 2" in find_message(tmp_path, annotation(segmentation=shorter))


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
    train = CocoFile(*write(tmp_path / "train", GOOD))
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
        val = CocoFile(*write(tmp_path / "val", content))
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

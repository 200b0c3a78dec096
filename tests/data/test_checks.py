# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Records, folders and image files: what counts, and what is named by file and id."""

import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.build import filter_images_with_only_crowd_annotations
from detectron2.data.detection_utils import check_image_size, read_image
from detectron2.structures import BoxMode
from PIL import Image

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    check_image_folder,
    find_image_errors,
    find_record_errors,
    images,
    list_classes,
    load_class_folders,
    load_classes,
    load_image_folders,
    register_image_folders,
)
from qbheat_det.data.datasets.image_folder import list_images
from tests.data.pictures import draw, save

WIDTH, HEIGHT = 60, 40


def record(path, **fields):
    return {"file_name": path, "image_id": 7, "width": WIDTH, "height": HEIGHT, **fields}


def error_kind(one):
    errors = find_image_errors([one])
    if not errors:
        return None
    assert errors[0].where == f"image {one['file_name']!r} (image id 7)"
    assert "\n" not in errors[0].message
    return errors[0].kind


WHOLE = [
    ("a.jpg", {}), ("a.jpg", {"mode": "CMYK", "progressive": True}), ("a.png", {"mode": "P"}),
    ("a.webp", {}), ("a.gif", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), WHOLE)
def test_whole_files_pass_and_a_jpeg_is_not_decoded(name, options, tmp_path, monkeypatch):
    path = save(tmp_path / name, draw(WIDTH, HEIGHT), **options)
    if name == "a.jpg":
        monkeypatch.setattr(images, "read_image", None)
        monkeypatch.setattr(Image.Image, "load", None)
    assert error_kind(record(path)) is None


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_a_file_cut_short_is_an_error_just_where_training_cannot_read_it(name, tmp_path):
    path = Path(save(tmp_path / name, draw(WIDTH, HEIGHT)))
    whole = path.read_bytes()
    for content in (*(whole[:-cut] for cut in (1, 2, 12, 500)), whole[:1000] + b"\0" * 99):
        path.write_bytes(content)
        try:
            readable = read_image(str(path), "BGR") is not None
        except Exception:
            readable = False
        assert (error_kind(record(str(path))) is None) == readable
    assert not readable


@pytest.mark.parametrize(
    "name", ["empty", "html", "nowhere/a.jpg", "folder", "nul\0", "16.png", "f.tif"]
)
def test_a_file_that_is_no_image_is_named(name, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "html").write_text("<!doctype html><title>404</title>")
    Image.fromarray(np.ones((HEIGHT, WIDTH), np.uint16)).save(tmp_path / "16.png")
    Image.fromarray(np.ones((HEIGHT, WIDTH), np.float32)).save(tmp_path / "f.tif")
    kinds = {"nowhere/a.jpg": "missing image file"}
    kinds |= dict.fromkeys(("16.png", "f.tif"), "image of more than 8 bits")
    assert error_kind(record(str(tmp_path / name))) == kinds.get(name, "unreadable image")


@pytest.mark.parametrize("orientation", [None, 1, 3, 5, 6, 8])
@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_the_size_counts_after_exif_rotation_as_in_detectron2(name, orientation, tmp_path):
    path = save(tmp_path / name, draw(WIDTH, HEIGHT), orientation=orientation)
    for size in ({}, {"width": HEIGHT, "height": WIDTH}):
        one = record(path, **size)
        try:
            check_image_size(dict(one), read_image(path, "BGR"))
            fits = True
        except ValueError:
            fits = False
        assert fits == (bool(size) == (orientation in (5, 6, 7, 8)))
        assert (error_kind(one) is None) == fits


def box(**fields):
    mask = [[1, 2, 31, 2, 31, 22]]
    box = {"bbox": [1, 2, 30, 20], "bbox_mode": BoxMode.XYWH_ABS, "category_id": 1}
    return {**box, "segmentation": mask, **fields}


def annotated(*annotations):
    return record("a.jpg", annotations=list(annotations))


def kinds(*records, **options):
    errors = find_record_errors("some", records, num_classes=2, **options)
    assert all("'some'" in error.where for error in errors)
    return [error.kind for error in errors]


def test_sound_records_pass_and_nothing_to_train_on_is_an_error():
    crowd = box(iscrowd=1, segmentation={"counts": "", "size": []})
    good = [annotated(), annotated(box(), crowd)]
    assert kinds(*good, filter_empty=True, mask_format="polygon") == []
    assert kinds({"file_name": "a.jpg", "image_id": 3}, longest=9) == []
    assert kinds(record("a.jpg", width=9000, height=2), longest=1333) == ["elongated image"]
    for records in ([annotated()], [annotated(crowd), annotated()]):
        assert filter_images_with_only_crowd_annotations(records) == []
        assert kinds(*records) == []
        assert kinds(*records, filter_empty=True) == ["no boxes"]
    assert kinds() == ["empty dataset"]


BAD_OBJECTS = [
    *({"category_id": value} for value in (2, -1, "cat")),
    {"bbox_mode": None},
    *({"bbox": value} for value in ([1, 2, 3], ["a", 2, 3, 4], None, [float("nan"), 2, 3, 4])),
    *({"bbox": value} for value in ([9, 9, -3, 4], [60, 9, 3, 4], [6, -9, 3, 9])),
    {"bbox": [9, 9, 3, 4], "bbox_mode": BoxMode.XYXY_ABS},
]


@pytest.mark.parametrize("fields", BAD_OBJECTS, ids=str)
def test_an_object_that_cannot_be_trained_on_is_named(fields):
    (error,) = find_record_errors("some", [annotated(box(), box(**fields))], num_classes=2)
    assert error.where == "dataset 'some': image id 7 ('a.jpg'), object 2"
    assert next(iter(fields)) in error.reason


def test_masks_are_needed_if_masks_are_trained():
    rle = {"counts": "x", "size": [40, 60]}
    for segmentation, mask_format, expected in (
        (None, "polygon", ["object without a mask"]),
        ([], "bitmask", ["object without a mask"]),
        (rle, "polygon", ["mask of another format"]),
        (rle, "bitmask", []),
    ):
        one = annotated(box(), box(segmentation=segmentation))
        assert kinds(one) == []
        assert kinds(one, mask_format=mask_format) == expected


NAME = "images_of_a_test"


def fill(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def listed(folder):
    return [os.path.relpath(path, folder) for path in list_images(folder)]


def test_files_of_known_endings_come_before_the_folders_beside_them(tmp_path):
    names = ["a.JPEG", "b.png", "c.webp", "z.TIFF", "B/1.jpg", "B/c/0.bmp", "a/x/9.tif", "b/0.jpg"]
    fill(tmp_path, *reversed(names), "h.txt", "i.jpg.part", "jpg", "m.gif")
    fill(tmp_path, "._a.jpg", ".jpg", ".ipynb_checkpoints/b.jpg", "a/.c.jpg")
    assert listed(tmp_path) == names


def test_links_are_followed_but_not_in_circles(tmp_path):
    one, two = fill(tmp_path / "one", "1.jpg"), fill(tmp_path / "two", "2.jpg")
    (one / "0.jpg").symlink_to(fill(tmp_path / "store", "blob") / "blob")
    (one / "self").symlink_to(one)
    (one / "up").symlink_to(tmp_path)
    (one / "two").symlink_to(two)
    (two / "one").symlink_to(one)
    assert listed(one) == ["0.jpg", "1.jpg", "two/2.jpg"]


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=re.escape(f"'{tmp_path}' cannot")):
        list_images(tmp_path)


def test_class_folders_are_labels_in_the_order_of_their_names(tmp_path):
    one = fill(tmp_path / "one", "dog/1.jpg", "cat/2.jpg", "cat/more/3.jpg")
    two = fill(tmp_path / "two", "eel/4.jpg", "cat/5.jpg")
    records, class_names = load_image_folders([one, f"{two}/"], labelled=True)
    assert class_names == ["cat", "dog", "eel"]
    found = [(Path(record["file_name"]).stem, record["label"]) for record in records]
    assert found == [("2", 0), ("3", 0), ("1", 1), ("5", 0), ("4", 2)]


def test_a_registered_set_is_listed_when_it_is_loaded(tmp_path, caplog):
    register_image_folders(NAME, [tmp_path], labelled=True)
    fill(tmp_path, "b/1.jpg", "a/2.jpg")
    assert [record["label"] for record in DatasetCatalog.get(NAME)] == [0, 1]
    metadata = MetadataCatalog.get(NAME)
    assert (metadata.unlabelled, metadata.folder_classes) == (True, ["a", "b"])
    # A name is registered again only for the same folders.
    register_image_folders(NAME, [f"{tmp_path}/"])
    with pytest.raises(UserError, match=NAME):
        register_image_folders(NAME, [tmp_path, tmp_path])
    fill(tmp_path, "stray.jpg")
    caplog.set_level(logging.INFO)
    assert len(DatasetCatalog.get(NAME)) == 2
    assert "1 image in no class folder" in caplog.text


BAD = [
    lambda root: fill(root, "train/a.jpg", "val/b.jpg") / "trian",
    lambda root: root / "a" / "b",
    lambda root: fill(root, "a.jpg") / "a.jpg",
    lambda root: root,
    lambda root: fill(root, ".a.jpg"),
    lambda root: fill(root, *(f"{i}.tar" for i in range(3)), "x/labels.TXT", "x/README"),
]


@pytest.mark.parametrize("make", BAD)
def test_a_folder_without_images_is_named(make, tmp_path):
    folder = make(tmp_path)
    for check in (list_images, check_image_folder):
        with pytest.raises(UserError, match=re.escape(f"'{folder}'")):
            check(folder)


def test_a_label_means_the_same_class_in_both_sets(tmp_path):
    train = fill(tmp_path / "a", "ant/1.jpg", "bee/1.jpg", "bee/2.jpg", "cat/1.jpg")
    val = fill(tmp_path / "b", "cat/1.jpg", "bee/1.jpg")
    first, second = load_class_folders(train, val)
    assert [record["label"] for record in first] == [0, 1, 1, 2]
    assert [record["label"] for record in second] == [1, 2]
    with pytest.raises(UserError, match=r"'.*a'.*ant"):
        load_class_folders(val, train)
    one = fill(tmp_path / "c", "ant/1.jpg", "ant/2.jpg")
    with pytest.raises(UserError, match="'ant'"):
        load_class_folders(one, one)


def test_labels_of_registered_sets_follow_the_list_that_is_given(tmp_path):
    fill(tmp_path, "bee/1.jpg", "cat/1.jpg", "cat/2.jpg")
    register_image_folders(NAME, [tmp_path], labelled=True)
    assert list_classes([NAME]) == ["bee", "cat"]
    assert [record["label"] for record in load_classes([NAME], ["cat", "dog", "bee"])] == [2, 0, 0]
    with pytest.raises(UserError, match=rf"'{NAME}'.*cat"):
        load_classes([NAME], ["bee"])
    register_image_folders("without_labels", [tmp_path])
    with pytest.raises(UserError, match="'without_labels'"):
        list_classes(["without_labels"])

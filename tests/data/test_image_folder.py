# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Folders of images: what counts, in which order, and the sentence where there is nothing."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    check_image_folder,
    list_classes,
    load_class_folders,
    load_classes,
    load_image_folders,
    load_labelled_sets,
    register_image_folders,
)
from qbheat_det.data.datasets.image_folder import list_images

NAME = "images_of_a_test"


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def listed(folder: Path) -> list[str]:
    return [os.path.relpath(path, folder) for path in list_images(folder)]


def test_files_of_known_endings_come_before_the_folders_beside_them(tmp_path: Path) -> None:
    names = ["a.JPEG", "b.png", "c.webp", "z.TIFF", "B/1.jpg", "B/c/0.bmp", "a/x/9.tif", "b/0.jpg"]
    fill(tmp_path, *reversed(names), "h.txt", "i.jpg.part", "jpg", "m.gif")
    fill(tmp_path, "._a.jpg", ".jpg", ".ipynb_checkpoints/b.jpg", "a/.c.jpg")
    assert listed(tmp_path) == names


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    one, two = fill(tmp_path / "one", "1.jpg"), fill(tmp_path / "two", "2.jpg")
    (one / "0.jpg").symlink_to(fill(tmp_path / "store", "blob") / "blob")
    (one / "self").symlink_to(one)
    (one / "up").symlink_to(tmp_path)
    (one / "two").symlink_to(two)
    (two / "one").symlink_to(one)
    assert listed(one) == ["0.jpg", "1.jpg", "two/2.jpg"]


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=re.escape(f"'{tmp_path}' cannot")):
        list_images(tmp_path)


@pytest.mark.parametrize("slash", ["", "/"])
def test_class_folders_are_labels_in_the_order_of_their_names(tmp_path: Path, slash: str) -> None:
    one = fill(tmp_path / "one", "dog/1.jpg", "cat/2.jpg", "cat/more/3.jpg")
    two = fill(tmp_path / "two", "eel/4.jpg", "cat/5.jpg")
    records, class_names = load_image_folders([f"{one}{slash}", f"{two}{slash}"], labelled=True)
    assert class_names == ["cat", "dog", "eel"]
    found = [(Path(record["file_name"]).stem, record["label"]) for record in records]
    assert found == [("2", 0), ("3", 0), ("1", 1), ("5", 0), ("4", 2)]


def test_a_registered_set_is_listed_when_it_is_loaded(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match=r"stray\.jpg'"):
        DatasetCatalog.get(NAME)


BAD: list[Callable[[Path], Path]] = [
    lambda root: fill(root, "train/a.jpg", "val/b.jpg") / "trian",
    lambda root: root / "a" / "b",
    lambda root: fill(root, "a.jpg") / "a.jpg",
    lambda root: root,
    lambda root: fill(root, ".a.jpg"),
    lambda root: fill(root, *(f"{i}.tar" for i in range(3)), "x/labels.TXT", "x/README"),
]


@pytest.mark.parametrize("make", BAD)
def test_a_folder_without_images_is_named(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = make(tmp_path)
    for check in (list_images, check_image_folder):
        with pytest.raises(UserError, match=re.escape(f"'{folder}'")):
            check(folder)


def test_a_label_means_the_same_class_in_both_sets(tmp_path: Path) -> None:
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


def test_labels_of_registered_sets_follow_the_list_that_is_given(tmp_path: Path) -> None:
    fill(tmp_path, "bee/1.jpg", "cat/1.jpg", "cat/2.jpg")
    register_image_folders(NAME, [tmp_path], labelled=True)
    assert list_classes([NAME]) == ["bee", "cat"]
    assert [record["label"] for record in load_classes([NAME], ["cat", "dog", "bee"])] == [2, 0, 0]
    with pytest.raises(UserError, match=rf"'{NAME}'.*cat"):
        load_classes([NAME], ["bee"])
    first, second = load_labelled_sets([NAME], [NAME])
    assert [record["label"] for record in first] == [0, 1, 1]
    assert first == second
    with pytest.raises(UserError, match="'qbheat_toy_val_images'"):
        load_labelled_sets(["qbheat_toy_val_images"], [NAME])

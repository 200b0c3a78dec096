# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The images of annotation files, and the sets of pre-training that have names."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import load_coco_images, register_coco_images
from qbheat_det.data.datasets import register_builtin_sets

NAME = "coco_images_of_a_test"
Content = dict[str, Any]


@pytest.fixture(autouse=True)
def _registered_nothing() -> Iterator[None]:
    yield
    if NAME in DatasetCatalog:
        DatasetCatalog.remove(NAME)
        MetadataCatalog.remove(NAME)


def write(folder: Path, change: Callable[[Content], object] = lambda content: None) -> Path:
    content: Content = {
        "images": [{"id": 7, "file_name": "b.jpg"}, {"id": 3, "file_name": "a.jpg"}]
    }
    change(content)
    for name in ("a.jpg", "b.jpg"):
        (folder / name).write_bytes(b"x")
    path = folder / "images.json"
    path.write_text(json.dumps(content))
    return path


def test_images_alone_are_enough_and_come_by_id(tmp_path: Path) -> None:
    assert load_coco_images(write(tmp_path), tmp_path) == [
        {"file_name": str(tmp_path / "a.jpg"), "image_id": 3},
        {"file_name": str(tmp_path / "b.jpg"), "image_id": 7},
    ]


BAD: dict[str, tuple[Callable[[Content], object], str]] = {
    "no_list": (lambda c: c.pop("images"), "'images' is missing"),
    "empty": (lambda c: c["images"].clear(), "the list 'images' is empty"),
    "id_twice": (lambda c: c["images"][0].update(id=3), "image id 3.*more than once"),
    "id_missing": (lambda c: c["images"][1].pop("id"), "image number 2"),
    "name_missing": (lambda c: c["images"][0].pop("file_name"), "image id 7.*file_name"),
    "no_file": (lambda c: c["images"][0].update(file_name="c.jpg"), "image id 7: there is no file"),
    "no_object": (lambda c: c["images"].append(5), r"images\[2\]: must be an object"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_not_sound_is_named(case: str, tmp_path: Path) -> None:
    change, expected = BAD[case]
    with pytest.raises(UserError, match=rf"images\.json: .*{expected}|images\.json: {expected}"):
        load_coco_images(write(tmp_path, change), tmp_path)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json' does not exist"):
        load_coco_images(tmp_path / "nowhere.json", tmp_path)
    with pytest.raises(UserError, match=r"image folder '.*gone' of .* does not exist"):
        load_coco_images(write(tmp_path), tmp_path / "gone")


def test_a_registered_set_makes_its_files_when_it_is_loaded(tmp_path: Path) -> None:
    json_file = tmp_path / "images.json"
    register_coco_images(NAME, json_file, tmp_path, prepare=lambda: write(tmp_path))
    assert not json_file.exists()
    assert len(DatasetCatalog.get(NAME)) == 2
    assert MetadataCatalog.get(NAME).unlabelled


def test_a_name_is_registered_again_only_for_the_same_files(tmp_path: Path) -> None:
    register_coco_images(NAME, tmp_path / "a.json", tmp_path)
    register_coco_images(NAME, tmp_path / "a.json", tmp_path)
    with pytest.raises(UserError, match="already registered"):
        register_coco_images(NAME, tmp_path / "b.json", tmp_path)
    with pytest.raises(UserError, match="already registered"):
        register_coco_images("qbheat_toy_val", tmp_path / "a.json", tmp_path)


def test_the_toy_set_has_its_images_without_annotations() -> None:
    images = DatasetCatalog.get("qbheat_toy_val_images")
    annotated = DatasetCatalog.get("qbheat_toy_val")
    assert [image["file_name"] for image in images] == [r["file_name"] for r in annotated]
    assert {key for image in images for key in image} == {"file_name", "image_id"}


def test_the_names_are_registered_without_touching_a_file() -> None:
    register_builtin_sets()  # again, as by a second import: nothing happens
    for split in ("train", "val"):
        (folder,) = MetadataCatalog.get(f"imagenet_{split}").image_folders
        assert folder.endswith(f"imagenet/{split}")
        for name in (f"coco_2017_{split}", f"qbheat_toy_{split}"):
            images, annotated = MetadataCatalog.get(f"{name}_images"), MetadataCatalog.get(name)
            assert images.unlabelled
            assert Path(images.json_file) == Path(annotated.json_file).absolute()

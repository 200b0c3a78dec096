# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two sets with the same classes, though each counts its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    list_classes,
    load_classes,
    load_image_folders,
    load_labelled_sets,
    register_image_folders,
    unite_labels,
)


def make(folder: Path, **counts: int) -> str:
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            (folder / name / f"{i}.jpg").touch()
    return str(folder)


def test_a_label_means_the_same_class_in_both_sets(tmp_path: Path) -> None:
    train = load_image_folders([make(tmp_path / "a", ant=1, bee=2, cat=1)], labelled=True)
    val = load_image_folders([make(tmp_path / "b", cat=1, bee=1)], labelled=True)
    assert [record["label"] for record in val[0]] == [0, 1]  # bee and cat, as counted alone
    first, second = unite_labels([train], [val], names=("a", "b"))
    assert [record["label"] for record in first] == [0, 1, 1, 2]
    assert [record["label"] for record in second] == [1, 2]
    joined, _ = unite_labels([train, val], [val], names=("a", "b"))
    assert [record["label"] for record in joined] == [0, 1, 1, 2, 1, 2]
    assert [record["image_id"] for record in joined] == list(range(6))


def test_a_class_that_only_the_second_set_has_is_named(tmp_path: Path) -> None:
    train = load_image_folders([make(tmp_path / "a", ant=1)], labelled=True)
    val = load_image_folders([make(tmp_path / "b", ant=1, bee=1, wasp=1)], labelled=True)
    with pytest.raises(UserError, match=r"'b' has images of 2 classes that 'a' lacks \(bee, wasp"):
        unite_labels([train], [val], names=("a", "b"))


def test_one_class_alone_is_refused(tmp_path: Path) -> None:
    folder = load_image_folders([make(tmp_path / "a", ant=2)], labelled=True)
    with pytest.raises(UserError, match="'a' holds images of one class alone, 'ant'"):
        unite_labels([folder], [folder], names=("a", "b"))


def test_a_set_without_labels_is_refused() -> None:
    with pytest.raises(UserError, match="'qbheat_toy_val_images' have no labels"):
        load_labelled_sets(["qbheat_toy_val_images"], ["qbheat_toy_val_images"])


@pytest.fixture
def sets(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The names of two registered sets: bee and cat, ant and bee."""
    names = ("labelled_images_a", "labelled_images_b")
    for name, counts in zip(names, ({"bee": 1, "cat": 2}, {"ant": 1, "bee": 1}), strict=True):
        register_image_folders(name, [make(tmp_path / name, **counts)], labelled=True)
    yield names
    for name in names:
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)


def test_labels_of_registered_sets_count_in_the_list_that_is_given(sets: tuple[str, str]) -> None:
    assert list_classes(sets) == ["ant", "bee", "cat"]
    records = load_classes(sets, ["cat", "bee", "dog", "ant"])
    names = [Path(record["file_name"]).parent.name for record in records]
    assert [(name, record["label"]) for name, record in zip(names, records, strict=True)] == [
        ("bee", 1),
        ("cat", 0),
        ("cat", 0),
        ("ant", 3),
        ("bee", 1),
    ]
    assert [record["image_id"] for record in records] == list(range(5))


def test_a_class_that_the_list_lacks_is_named(sets: tuple[str, str]) -> None:
    with pytest.raises(UserError, match=r"labelled_images_b' has images of 1 .*know \(ant\)"):
        load_classes([sets[1]], ["bee", "cat"])

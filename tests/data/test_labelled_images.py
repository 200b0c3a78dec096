# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two sets with the same classes, though each counts its own."""

from pathlib import Path

import pytest

from qbheat_det.data import load_image_folders, load_labelled_sets, unite_labels
from qbheat_det.errors import UserError


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


def test_a_set_without_labels_is_refused() -> None:
    with pytest.raises(UserError, match="'qbheat_toy_val_images' have no labels"):
        load_labelled_sets(["qbheat_toy_val_images"], ["qbheat_toy_val_images"])

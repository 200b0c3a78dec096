# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The toy set: the same bytes every time, and annotations that agree with the pixels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from qbheat_det.core.errors import UserError
from qbheat_det.data import ToySpec, get_cache_dir, prepare_toy_set
from qbheat_det.data.datasets import toy
from qbheat_det.data.datasets.toy import CATEGORY_IDS, annotate, trace_polygons
from qbheat_det.data.datasets.toy_scenes import Scene, sample_scene

SPEC = ToySpec(name="tiny", num_images=40, seed=3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_toy_set(SPEC, tmp_path_factory.mktemp("cache"))


def scenes(count: int, size: int = 128) -> list[Scene]:
    return [sample_scene(np.random.default_rng([5, index]), size) for index in range(count)]


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def decode(polygons: list[list[int]], height: int, width: int) -> NDArray[np.bool_]:
    """Rasterises as Detectron2's ``polygons_to_bitmask`` and pycocotools do."""
    rles = coco_mask.frPyObjects(polygons, height, width)
    return coco_mask.decode(coco_mask.merge(rles)).astype(bool)


def test_the_same_spec_gives_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    again = prepare_toy_set(SPEC, tmp_path)
    assert again.name == tiny.name
    assert contents(again) == contents(tiny)
    assert len(contents(tiny)) == SPEC.num_images + 1
    # An image does not depend on how many there are.
    fewer = contents(prepare_toy_set(replace(SPEC, num_images=3), tmp_path))
    assert fewer["images/000003.jpg"] == contents(tiny)["images/000003.jpg"]


def test_annotations_agree_with_a_pixel_by_pixel_count() -> None:
    for scene in scenes(6):
        objects = [i for i, item in enumerate(scene.items) if item.label >= 0]
        for index, annotation in zip(objects, annotate(scene), strict=True):
            height, width = scene.owner.shape
            pixels = [
                (x, y) for y in range(height) for x in range(width) if scene.owner[y, x] == index
            ]
            xs, ys = [x for x, _ in pixels], [y for _, y in pixels]
            box = [min(xs), min(ys), max(xs) + 1 - min(xs), max(ys) + 1 - min(ys)]
            assert annotation["bbox"] == box
            assert annotation["area"] == len(pixels)
            assert annotation["category_id"] == CATEGORY_IDS[scene.items[index].label]
            mask = decode(annotation["segmentation"], height, width)
            np.testing.assert_array_equal(mask, scene.owner == index)


def test_owners_are_what_painting_one_by_one_leaves() -> None:
    for scene in scenes(3):
        size = len(scene.owner)
        expected = [[-1] * size for _ in range(size)]
        for index, item in enumerate(scene.items):
            for row, column in zip(*np.nonzero(item.mask), strict=True):
                y, x = item.top + row, item.left + column
                if 0 <= y < size and 0 <= x < size:
                    expected[y][x] = index
        np.testing.assert_array_equal(scene.owner, expected)
        assert all(
            (scene.owner == index).sum() >= 0.5 * item.mask.sum()
            for index, item in enumerate(scene.items)
            if item.label >= 0
        )  # every object stays in view


def test_polygons_give_back_any_mask() -> None:
    # Random dots have every kind of corner: holes, touching diagonals, islands in holes.
    for seed in range(6):
        mask = np.random.default_rng(seed).random((23, 31)) < 0.2 + 0.1 * seed
        np.testing.assert_array_equal(decode(trace_polygons(mask), 23, 31), mask)


def test_a_cache_that_cannot_be_written_is_named_and_a_half_written_set_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="QBHEAT_CACHE") as caught:
        prepare_toy_set(SPEC, tmp_path / "file")
    assert str(tmp_path / "file") in str(caught.value)

    def fail_late(spec: ToySpec, folder: Path) -> None:
        (folder / "images").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(toy, "_draw", fail_late)
    with pytest.raises(KeyboardInterrupt):
        prepare_toy_set(SPEC, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("QBHEAT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert get_cache_dir() == Path("/home/someone/.cache/qbheat_det")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert get_cache_dir() == Path("/scratch/cache/qbheat_det")
    monkeypatch.setenv("QBHEAT_CACHE", "~/toys")
    assert get_cache_dir() == Path("/home/someone/toys")

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The selection of images: which it takes, which it leaves out, and what it writes."""

import functools
import json
import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qbheat_det.core.errors import UserError
from qbheat_det.inference import embedding
from qbheat_det.labelling import select, write_selection
from qbheat_det.labelling.selection import list_labelled
from tests.tool_modules import load_tool

DETECTOR = "retinanet/285M_bccd"
CELLS = Path(__file__).resolve().parents[2] / "docs" / "cells.jpg"
OPEN_ENCODER = functools.cache(embedding.open_encoder)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Six pictures, one of them twice, and files that are broken, of 16 bits and hidden."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(6):
        coarse = generator.integers(0, 255, (3 + number, 4, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((160, 120))
        image.save(folder / f"{number}.png")
    image.save(os.fsencode(folder / "5_again_") + b"\xff.png")  # no text
    (folder / "broken.png").write_bytes(b"not an image")
    Image.new("I;16", (160, 120), 999).save(folder / "deep.png")
    image.transpose(Image.Transpose.ROTATE_180).save(folder / ".hidden.png")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(embedding, "open_encoder", OPEN_ENCODER)


def names(files):
    return {Path(file).name for file in files}


def write_labels(folder, copied):
    """Writes copies of images, and a COCO file without boxes; one class has none yet."""
    for name, path in copied.items():
        (folder / name).write_bytes(path.read_bytes())
    images = [
        {"id": i, "file_name": name, "width": 160, "height": 120} for i, name in enumerate(copied)
    ]
    content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    (folder / "labels.json").write_text(json.dumps(content))
    return str(folder / "labels.json")


@pytest.mark.parametrize("strategy", ["random", "k_center"])
def test_each_picture_is_selected_once_and_what_is_left_out_is_named(photos, strategy, tmp_path):
    found = select(photos, 6, strategy=strategy)
    assert names(found.files) == {f"{number}.png" for number in range(6)}
    assert [Path(path).name for path in found.pool.repeated] == ["5_again_\udcff.png"]
    assert names(found.pool.unreadable) == {"broken.png", "deep.png"}
    assert "tensor" not in repr(found)
    page = write_selection(found, tmp_path)[-1].read_text()
    assert ("most informative" in page) is (strategy == "k_center")


@pytest.mark.parametrize("strategy", ["k_center", "balanced"])
def test_a_skipped_image_is_replaced_until_none_is_left(photos, strategy):
    weights = DETECTOR if strategy == "balanced" else None
    found = select([photos, CELLS], 3, strategy=strategy, weights=weights)
    seen = [*found.files]
    for number in range(1, 8):
        last, found = found, found.skip(found.files[0])
        assert found.files[:2] == last.files[1:3]
        seen += found.files[2:]
        assert len(found.files) == min(3, 7 - number)
    assert names(seen) == {"cells.jpg", *(f"{number}.png" for number in range(6))}
    assert len(seen) == 7
    assert (CELLS.name in {Path(path).name for path in found.boxes}) is bool(weights)


def test_images_with_labels_and_their_copies_are_never_selected(photos, tmp_path):
    copied = {name: photos / name for name in ("5.png", "4.png", "broken.png")}
    data = write_labels(tmp_path, copied)
    found = select([photos, tmp_path / "5.png"], 4, data=data)
    assert names(found.files) == {f"{number}.png" for number in range(4)}
    assert found.pool.num_labelled == 2
    for name in ("5.png", "4.png"):  # the labels alone: their images are in the pool
        (tmp_path / name).unlink()
    assert names(select(photos, 4, data=data).files) == {f"{number}.png" for number in range(4)}
    write_labels(tmp_path, copied)
    with pytest.raises(UserError, match="only 4 images are left"):
        select(photos, 5, data=data)
    (tmp_path / "link.png").symlink_to(tmp_path / "5.png")
    with pytest.raises(UserError, match="of which 0 have no labels"):
        select(tmp_path / "link.png", 1, val=data)
    data = write_labels(tmp_path, {"a.png": photos / "0.png"})
    with pytest.raises(UserError, match="1 repeat others"):
        select(photos / "0.png", 1, data=data)


def test_skipped_tasks_of_label_studio_can_be_selected(photos, tmp_path):
    size = {"original_width": 160, "original_height": 120}
    polygon = {"points": [[10, 10], [30, 10], [20, 40]], "polygonlabels": ["a"]}
    box = {"x": 10, "y": 10, "width": 20, "height": 20, "rotation": 45, "rectanglelabels": ["a"]}
    tasks = []  # the third is skipped; the last is an image without objects
    for i, values in enumerate(([polygon], [box], [], [])):
        found = {"result": [{**size, "value": one} for one in values], "was_cancelled": i == 2}
        tasks.append({"id": i, "data": {"image": f"{i}.png"}, "annotations": [found]})
        (tmp_path / f"{i}.png").symlink_to(photos / f"{i}.png")
    (tmp_path / "export.json").write_text(json.dumps(tasks))
    found = select(photos, 3, data=str(tmp_path / "export.json"))
    assert names(found.files) == {"2.png", "4.png", "5.png"}


def test_vectors_come_from_the_cache(photos, monkeypatch):
    files = [str(photos / f"{number}.png") for number in range(3)]
    files.append(f"{photos}/../{photos.name}/0.png")  # the same file by another path
    first = embedding.embed_images(files)
    assert first.files == files
    monkeypatch.setattr(embedding.Embedder, "embed", None)
    again = embedding.embed_images(files[::-1])
    torch.testing.assert_close(again.vectors, first.vectors.flip(0), rtol=0, atol=0)
    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: sqlite3.Connection(photos / "0.png"))
    with pytest.raises(UserError, match="QBHEAT_CACHE"):
        embedding.embed_images(files)


def test_a_detector_brings_its_images_and_its_boxes(photos, tmp_path):
    found = select([photos, CELLS], 1, weights=DETECTOR)
    assert Path(found.files[0]).name == "cells.jpg"  # the only one with cells
    paths = {path.name: path for path in write_selection(found, tmp_path)}
    (task,) = json.loads(paths["label_studio.json"].read_text())
    dataset = json.loads(paths["cvat.json"].read_text())
    boxes = task["predictions"][0]["result"]
    assert len(boxes) == len(dataset["annotations"]) > 5
    assert dataset["images"][0]["file_name"] == CELLS.name
    assert paths["selected.txt"].read_text() == f"{CELLS}\n"
    page = paths["index.html"].read_text()
    assert page.count("<img") == 1
    assert "http" not in page


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--budget", "7"], "--budget"),
        (["--budget", "0"], "--budget"),
        (["--budget", "1", "--seeds", "1"], "--seeds is only"),
        (["--budget", "1", "--simulate", "1"], "--budget is not"),
        (["--budget", "1", "--data", str(CELLS), "--output", str(CELLS.parent)], "is inside"),
        (["--budget", "1", "--output", "site"], "already has 'index.html'"),
        (["--budget", "1", "--strategy", "balanced"], "--weights"),
        (["--budget", "1", "--encoder", DETECTOR], DETECTOR),
        (["--budget", "1", "--weights", "no_such_run"], "no_such_run"),
    ],
)
def test_bad_input_is_named(photos, tmp_path, arguments, named, capsys, monkeypatch):
    (tmp_path / "site" / "index.html").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    base = ["--images", str(photos), "--output", str(tmp_path / "next")]
    with pytest.raises((SystemExit, UserError)):
        load_tool("select_images").main([*base, *arguments])
    assert named in capsys.readouterr().err
    assert not (tmp_path / "next").exists()


def test_the_share_of_faults_in_labelled_data_can_be_raised(tmp_path):
    for stem in "abcd":
        Image.new("RGB", (40, 20)).save(tmp_path / f"{stem}.jpg")
        (tmp_path / f"{stem}.txt").write_text("0 .5 .5 .5 .5\n")
    (tmp_path / "d.txt").write_text("0 .5 .5 .5\n")
    with pytest.raises(UserError, match=r"1 box of 4 would be left out.*--max-left-out"):
        list_labelled(str(tmp_path))
    files, account = list_labelled(str(tmp_path), max_left_out=0.3)
    assert len(files) == 4
    assert len(account.faults) == 1

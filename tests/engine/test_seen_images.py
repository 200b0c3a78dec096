# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Real folders train at the first command, and no image that was trained on validates later."""

import json
import logging
import os
import shutil

import pytest
from detectron2.data import DatasetCatalog
from PIL import Image

from qbheat_det.data import SeenImages, fingerprint_images
from qbheat_det.engine import setup
from qbheat_det.engine.run_record import find_shared_images
from tests.data import test_layouts as layouts

from .tiny_training import CONFIG, TINY, assemble, parse_run, run_tool, words_of

QUICK = {**TINY, "SOLVER.MAX_ITER": "1", "SOLVER.CHECKPOINT_PERIOD": "1", "MODEL.DEVICE": "cpu"}


@pytest.mark.parametrize(
    "make",
    [
        layouts.kangaroo,
        layouts.repository,
        layouts.labelme,
        layouts.cvat_coco,
        layouts.cvat_images,
        layouts.cvat_voc,
        layouts.cvat_yolo,
    ],
    ids=lambda make: make.__name__,
)
def test_a_folder_trains_at_the_first_command(tmp_path, make):
    make(root := tmp_path / "set")
    output = tmp_path / "run"
    flags = ["--config-file", CONFIG, "--data", str(root), "--output", str(output)]
    results = run_tool([*flags, *words_of(QUICK)])
    assert "AP" in results["bbox"]
    (start,) = json.loads((output / "run.json").read_text())
    account = start["account"]
    assert account["images"]["used"] in (6, 12)
    assert account["boxes"]["used"] == 2 * account["images"]["used"]
    assert "Used: " in (output / "log.txt").read_text()


def write_set(root, names):
    """Writes a YOLO folder of different images."""
    for name in names:
        path = root / "images" / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_mandelbrot((64, 48), (-2, -2, 2, 2), 10 + ord(name[-1])).save(path)
        (root / "labels").mkdir(exist_ok=True)
        (root / "labels" / f"{name}.txt").write_text("0 .5 .5 .5 .5\n")
    (root / "classes.txt").write_text("cat\n")


def configure(data, output, *flags, **opts):
    args = parse_run(CONFIG, QUICK, "--data", str(data), "--output", str(output), *flags)
    stage = assemble(args)
    setup(stage)
    return stage


def list_prints(name):
    paths = [record["file_name"] for record in DatasetCatalog.get(name)]
    return set(fingerprint_images(paths).values())


def test_a_detector_that_is_trained_further_keeps_its_validation_images(tmp_path):
    write_set(tmp_path / "one", "abcdefghijklmnopqrst")
    run = tmp_path / "run"
    flags = ["--config-file", CONFIG, "--data", str(tmp_path / "one"), "--output", str(run)]
    run_tool([*flags, *words_of(QUICK)])
    first = SeenImages.read(run)
    assert (len(first.train), len(first.val)) == (16, 4)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for kind, suffix in (("images", "jpg"), ("labels", "txt")):  # the same images, renamed
        for path in (tmp_path / "two" / kind).iterdir():
            os.rename(path, path.with_name(f"new_{path.stem}.{suffix}"))
    write_set(tmp_path / "two", "uvwxyz0123")
    for seed in "12":
        weights = ("--weights", str(run), "SEED", seed)
        stage = configure(tmp_path / "two", tmp_path / f"again{seed}", *weights)
        train, val = list_prints("custom_train"), list_prints("custom_val")
        assert first.val <= val
        assert not val & first.train
        assert len(train) + len(val) == 30
        assert not stage.data.shared
        again = SeenImages.read(tmp_path / f"again{seed}")
        assert again.train == first.train | train
    assert len(val) > len(first.val)  # new images get a side too


def test_validation_images_that_were_trained_on_are_counted(tmp_path, caplog):
    write_set(tmp_path / "one", "abcdefghij")
    run = tmp_path / "run"
    flags = ["--config-file", CONFIG, "--output"]
    run_tool([*flags, str(run), "--data", str(tmp_path / "one"), *words_of(QUICK)])
    seen = SeenImages.read(run)
    write_set(tmp_path / "val", "abcxyz")
    paths = [str(path) for path in (tmp_path / "val/images").iterdir()]
    shared = len(seen.train.intersection(fingerprint_images(paths).values()))
    assert shared
    write_set(tmp_path / "new", "klmno")
    again = tmp_path / "again"
    words = [str(again), "--data", str(tmp_path / "new"), "--val", str(tmp_path / "val")]
    run_tool([*flags, *words, "--weights", str(run), *words_of(QUICK)])
    (text,) = find_shared_images(again)
    assert f"{shared} of 6 validation images are training images of '{run}" in text
    assert text.split("'")[0] in (again / "report.html").read_text()
    shutil.copy(tmp_path / "new/images/k.jpg", tmp_path / "val/images/x.jpg")
    words[0] = str(both := tmp_path / "both")
    run_tool([*flags, *words, "--weights", str(run), *words_of(QUICK)])
    (text,) = find_shared_images(both)
    assert "1 of 6 validation images are training images and " in text
    assert f"{shared} of 6 validation images are training images of '" in text
    with caplog.at_level(logging.WARNING):
        configure(tmp_path / "val", tmp_path / "eval", "--eval-only", "--weights", str(run))
    assert f"{shared} of 6 validation images" in caplog.text


def test_images_that_are_replaced_before_a_run_is_resumed_are_counted(tmp_path, caplog):
    write_set(tmp_path / "one", "abcdefghij")
    run = tmp_path / "run"
    flags = ["--config-file", CONFIG, "--data", str(tmp_path / "one"), "--output", str(run)]
    run_tool([*flags, *words_of(QUICK)])
    with caplog.at_level(logging.WARNING):
        configure(tmp_path / "one", run, "--resume")
        assert "other contents" not in caplog.text
        for red, name in enumerate("abc"):
            Image.new("RGB", (64, 48), (80 * red, 0, 0)).save(tmp_path / f"one/images/{name}.jpg")
        configure(tmp_path / "one", run, "--resume")
    assert "3 of 10 images have other contents than at the last start" in caplog.text


def test_a_resumed_run_leaves_out_the_images_of_its_start(tmp_path):
    write_set(tmp_path / "one", "abcdefghijklmnopqrst")
    broken = tmp_path / "one/images/c.jpg"
    broken.write_bytes(broken.read_bytes()[:-200])
    run = tmp_path / "run"
    flags = ["--config-file", CONFIG, "--data", str(tmp_path / "one"), "--output", str(run)]
    opts = words_of({**QUICK, "SOLVER.MAX_ITER": "2"})
    run_tool([*flags, *opts])
    (start,) = json.loads((run / "run.json").read_text())
    assert start["broken_images"] == [str(broken)]
    assert start["account"]["images"]["left_out"] == {"with damaged pixels": 1}
    assert str(broken) in (run / "left_out.txt").read_text()
    images = [record["file_name"] for record in DatasetCatalog.get("custom_train")]
    another = tmp_path / "one/images" / os.path.basename(images[0])
    another.write_bytes(another.read_bytes()[:-200])  # breaks after the start
    results = run_tool([*flags, "--resume", *words_of({**QUICK, "SOLVER.MAX_ITER": "4"})])
    assert "AP" in results["bbox"]
    assert [record["file_name"] for record in DatasetCatalog.get("custom_train")] == images

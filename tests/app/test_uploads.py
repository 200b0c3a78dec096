# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Uploads of the page: what is refused before a decoder sees it, and what is drawn of the rest."""

import json
import os
import time
import zipfile
from pathlib import Path

import PIL.Image
import pytest
import torch
from detectron2.structures import Boxes, Instances

from qbheat_det.api import Detections
from qbheat_det.app import Models, uploads
from qbheat_det.app.label_review import LabelReview
from qbheat_det.app.review import Pools
from qbheat_det.core.errors import UserError
from qbheat_det.labelling import select
from tests.data.pictures import draw, save


class FakeDetector:
    """Finds a "cat" with score 0.9 and a "dog" with score 0.4 wherever it looks."""

    def predict(self, image, *, threshold):
        instances = Instances(image.shape[:2])
        instances.pred_boxes = Boxes(torch.tensor([[1.0, 2.0, 30.0, 20.0], [0.0, 0.0, 9.0, 9.0]]))
        instances.scores, instances.pred_classes = torch.tensor([0.9, 0.4]), torch.tensor([0, 1])
        names = {"class_names": ["cat", "dog"], "category_ids": [7, 9]}
        return Detections(source=image, prediction=instances, **names)


def test_what_is_no_image_is_named_with_the_reason(tmp_path):
    contents = {
        "a.png": b"no image",
        "a.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "a.mp4": b"#EXTM3U\nfile:///etc/passwd\n",
        "a.txt": b"text",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found, skipped = uploads.detect(FakeDetector(), [tmp_path / name for name in contents])
    assert found == []
    for name, text in zip(contents, skipped, strict=True):
        assert name in text
        assert "not an image" in text


def test_files_and_pixels_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "MAX_FILES", 2)
    monkeypatch.setattr(uploads, "MAX_PIXELS", 64 * 48 * 5)
    small, large = tmp_path / "small.png", tmp_path / "large.png"
    PIL.Image.new("RGB", (64, 48)).save(small)
    PIL.Image.new("RGB", (64 * 5, 49)).save(large)
    paths = [small, large, tmp_path / "third.png"]
    found, skipped = uploads.detect(FakeDetector(), paths)
    assert [one.file_name for one in found] == ["small.png"]
    assert [text.split("`")[1] for text in skipped] == ["third.png", "large.png"]


def test_threshold_and_classes_choose_what_is_drawn_and_written(tmp_path):
    image = tmp_path / "../x y.png"
    PIL.Image.new("RGB", (64, 48)).save(image)
    found, _ = uploads.detect(FakeDetector(), [image, image])
    seen = {}
    for key, (threshold, classes) in {
        "all": (0.3, []), "high": (0.5, []), "dog": (0.3, ["dog"])
    }.items():  # fmt: skip
        folder = tmp_path / key
        folder.mkdir()
        gallery, rows, archive = uploads.render(found, folder, threshold=threshold, classes=classes)
        with zipfile.ZipFile(archive) as stream:
            boxes = json.loads(stream.read("boxes.json"))
            assert {*stream.namelist()} == {"boxes.json", "1-x y.jpg", "2-x y.jpg"}
        assert (len(rows), len(gallery)) == (len(boxes), 2)
        seen[key] = sorted({(box["category_id"], round(box["score"], 1)) for box in boxes})
    assert seen == {"all": [(7, 0.9), (9, 0.4)], "high": [(7, 0.9)], "dog": [(9, 0.4)]}


def test_files_are_removed_when_they_are_old_and_no_younger_one_is(tmp_path):
    for name in ("upload/a.png", "results/b.zip", "results/input/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (0, 0))  # a copy may say that it is old
    time.sleep(0.05)
    middle = time.time()
    time.sleep(0.05)
    (tmp_path / "results/young.zip").write_bytes(b"")
    uploads.remove_old_files(tmp_path, 3600)
    assert len(list(tmp_path.rglob("*.*"))) == 4
    uploads.remove_old_files(tmp_path, time.time() - middle)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"results", "results/young.zip"}
    uploads.remove_old_files(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_encoder_of_the_zoo_shows_attention_and_reconstruction(tmp_path):
    image = tmp_path / "image.png"
    save(image, draw(90, 80))
    models = Models(device="cpu")
    first = next(label for label, task in models.tasks.items() if task == "pretraining")
    gallery = uploads.draw_encoder(models.open_run(first), image, tmp_path)
    assert len(gallery) == 3  # two directions of attention, and the reconstructions
    assert all(PIL.Image.open(file).size[0] > 100 for file, _ in gallery)
    assert len({caption for _, caption in gallery}) == 3


def test_own_models_come_first_and_only_known_ones_open():
    models = Models(["qbheat://retinanet/285M_bccd"])
    assert next(iter(models.tasks)) == "retinanet/285M_bccd"
    assert [label for label in models.tasks if label.startswith("timm/")] == []
    with pytest.raises(KeyError):
        models.open_detector("/etc/passwd")
    with pytest.raises(UserError, match="no-such-run"):
        Models(["no-such-run"])


def test_a_review_has_the_images_of_select_and_writes_the_accepted_ones(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(5):
        save(folder / f"{number}.png", draw(160, 120, seed=number))
    pools = Pools([str(folder)])
    first = pools.select(str(folder), 3, None)
    assert first.selection.files == select(folder, 3).files
    drawn = first.draw()
    assert drawn is not None
    assert drawn.size == (160, 120)
    with pytest.raises(UserError, match="accept an image"):
        first.write(tmp_path)
    review = first.accept().skip()
    assert review.selection.skipped == (first.selection.files[1],)
    assert review.current == first.selection.files[2]
    assert "1 of 3 accepted, 1 skipped" in review.describe()
    done = review.accept().back().accept().accept()
    assert done.is_done
    assert done.draw() is None
    with pytest.raises(UserError, match="accepted or skipped"):
        done.skip()
    with zipfile.ZipFile(done.back().write(tmp_path)) as archive:
        listed = archive.read("selected.txt").decode().splitlines()
        assert {"index.html", "label_studio.json", "cvat.json"} < {*archive.namelist()}
    assert listed == [first.selection.files[0], first.selection.files[2]]
    with pytest.raises(UserError, match="--images /etc"):
        pools.select("/etc", 1, None)


def test_a_review_of_labels_writes_the_accepted_corrections(tmp_path):
    save(tmp_path / "a.png", draw(160, 120))
    moved = {
        "kind": "location",
        "score": 0.8,
        "image_id": 1,
        "file_name": "a.png",
        "annotation_id": 5,
        "category_id": 3,
        "category": "fish",
        "bbox": [20, 20, 30, 30],
        "annotated_category": "fish",
        "annotated_bbox": [40, 20, 30, 30],
    }
    others = [{**moved, "annotation_id": 6}, {**moved, "annotation_id": 7}]
    content = {"data": "digest", "image_root": str(tmp_path), "suspects": [moved, *others]}
    suspects = tmp_path / "suspects.json"
    suspects.write_text(json.dumps(content))
    review = LabelReview.open(str(tmp_path), [str(tmp_path)])
    drawn = review.draw()
    assert drawn is not None
    assert max(drawn.size) == 800
    with pytest.raises(UserError, match="accept a correction"):
        review.skip().write(tmp_path)
    decided = review.skip().accept().accept()
    assert decided.is_done
    assert decided.draw() is None
    with pytest.raises(UserError, match="accepted or skipped"):
        decided.accept()
    changed = decided.back().skip()
    assert "1 accepted, 2 skipped" in changed.describe()
    saved = json.loads(Path(changed.write(tmp_path)).read_text())
    assert saved == {"data": "digest", "suspects": [others[0]]}
    (tmp_path / "a.png").unlink()
    with pytest.raises(UserError, match=r"a\.png"):
        review.draw()
    with pytest.raises(UserError, match="--suspects /etc"):
        LabelReview.open("/etc", [str(tmp_path)])
    del content["image_root"]
    suspects.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"suspects\.json"):
        LabelReview.open(str(tmp_path), [str(tmp_path)])

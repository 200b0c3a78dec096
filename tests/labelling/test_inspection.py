# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Suspects of wrong labels by hand, made errors, the page of suspects, and corrected labels."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from qbheat_det.core.errors import UserError
from qbheat_det.labelling import apply_corrections, inspect_labels, inspection, write_suspects
from qbheat_det.labelling.labels import ImageBoxes
from qbheat_det.labelling.suspects import (
    calibrate,
    find_suspects,
    make_errors,
    similarity,
)
from tests.data.pictures import draw, save

BOXES = [[4, 4, 8, 8], [20, 4, 8, 8], [4, 20, 8, 8]]


def write_data(folder, num_images=12):
    """Writes images with the three ``BOXES`` of classes 3, 5 and 3."""
    ids = range(1, num_images + 1)
    images = [{"id": i, "file_name": f"{i}.png", "width": 32, "height": 32} for i in ids]
    for image in images:
        save(folder / image["file_name"], draw(32, 32, seed=image["id"]))
    boxes = [
        {"id": 10 * i + k, "image_id": i, "category_id": (3, 5, 3)[k], "bbox": box, "area": 64}
        for i in ids
        for k, box in enumerate(BOXES)
    ]
    names = [{"id": 3, "name": "fish"}, {"id": 5, "name": "shark"}]
    content = {"images": images, "annotations": boxes, "categories": names}
    (folder / "boxes.json").write_text(json.dumps(content))
    return folder / "boxes.json"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Labels with one error of each kind, and detectors that predict the true boxes."""
    path = write_data(tmp_path)
    truth = json.loads(path.read_text())
    wrong = json.loads(path.read_text())
    by_id = {entry["id"]: entry for entry in wrong["annotations"]}
    by_id[10]["category_id"] = 5
    by_id[21]["bbox"] = [24, 8, 8, 8]
    wrong["annotations"].remove(by_id[32])
    path.write_text(json.dumps(wrong))

    def train(flags):
        halves = [json.loads(Path(file).read_text())["images"] for file in (flags.data, flags.val)]
        seen, held_out = ({image["id"] for image in half} for half in halves)
        assert (len(seen & held_out), len(seen | held_out)) == (0, 12)
        results = Path(flags.output) / "inference" / "custom_val" / "coco_instances_results.json"
        results.parent.mkdir(parents=True)
        found = [{**e, "score": 0.9} for e in truth["annotations"] if e["image_id"] in held_out]
        results.write_text(json.dumps(found))
        return None, {"bbox": {"AP50": 90.0}}

    monkeypatch.setattr(inspection, "train_afresh", train)
    return path


def test_errors_come_first_are_drawn_and_corrected(data, tmp_path):
    labels, suspects, quality = inspect_labels(str(data), tmp_path / "out", encoder="distill/285M")
    assert quality == [90.0, 90.0]
    first = {one.kind: one for one in suspects[:3]}
    first_class = first["class"]
    assert (first_class.annotation_id, first_class.text) == (10, "labelled shark, looks like fish")
    assert (first["location"].annotation_id, first["location"].bbox) == (21, (20, 4, 8, 8))
    assert (first["missing"].image_id, first["missing"].bbox) == (3, (4, 20, 8, 8))
    page = write_suspects(labels, suspects[:3], tmp_path / "out", "qbheat inspect --apply x")
    text = page.read_text()
    assert text.count("data:image/jpeg") == 3
    saved = json.loads(re.search(r"const content = (.*);", text)[1])
    assert saved == json.loads((tmp_path / "out" / "suspects.json").read_text())

    output, before = tmp_path / "corrected labels.json", data.read_bytes()
    saved["suspects"] += [one | {"score": 0.1} for one in saved["suspects"]]  # repeats
    (tmp_path / "out" / "suspects.json").write_text(json.dumps(saved))
    summary = apply_corrections(tmp_path / "out" / "suspects.json", str(data), output)
    assert summary.startswith("1 box added, 1 moved, 1 given another class")
    assert shlex.split(summary.splitlines()[-1])[:4] == ["qbheat", "train", "--data", str(output)]
    with pytest.raises(UserError, match="exists"):
        apply_corrections(tmp_path / "out" / "suspects.json", str(data), data)
    assert data.read_bytes() == before
    (tmp_path / "true").mkdir()
    expected = json.loads(write_data(tmp_path / "true").read_text())["annotations"]
    found = json.loads(output.read_text())["annotations"]
    key = ("image_id", "category_id", "bbox")
    found, expected = (sorted([e[k] for k in key] for e in one) for one in (found, expected))
    assert found == expected


def test_made_errors_are_those_that_are_returned():
    boxes = torch.tensor([[0.0, 0, 8, 8]] * 50)
    truth = [ImageBoxes(boxes, torch.arange(50) % 3, torch.ones(50))] * 4
    for kind in ("missing", "location", "class"):
        generator = np.random.default_rng(0)
        changed, errors = make_errors(kind, truth, generator)
        assert 5 < sum(map(len, errors)) < 45
        for before, after, own in zip(truth, changed, errors, strict=True):
            if kind == "missing":
                assert len(after.boxes) == 50 - len(own)
                continue
            moved = (before.boxes != after.boxes).any(1)
            renamed = before.classes != after.classes
            found = moved if kind == "location" else renamed
            assert set(found.nonzero()[:, 0].tolist()) == own
            assert not (renamed if kind == "location" else moved).any()
    of_one_class = [ImageBoxes(boxes, torch.zeros(50).long(), torch.ones(50))]
    assert make_errors("class", of_one_class, np.random.default_rng(0))[1] == [set()]


def test_scores_that_errors_do_not_raise_mean_nothing():
    boxes = torch.tensor([[0.0, 0, 8, 8], [20, 20, 28, 28]])
    truth = [ImageBoxes(boxes, torch.tensor([0, 1]), torch.ones(2))] * 20
    seen = [ImageBoxes(boxes, torch.tensor([0, 1]), torch.full((2,), 0.9))] * 20
    assert calibrate(find_suspects(truth, seen), truth, seen, 0) == []


def test_corrections_that_do_not_fit_are_refused(data, tmp_path):
    labels, suspects, _ = inspect_labels(str(data), tmp_path / "out")
    moved = [one for one in suspects if one.kind == "location"][:1]
    write_suspects(labels, moved, tmp_path / "out", "")
    file = tmp_path / "corrections.json"
    for change, named in (
        ({"data": "0"}, "inspect again"),
        ({"kind": "odd"}, r"suspects\[0\].*'missing' or 'location' or 'class'"),
        ({"suspects": None}, "corrections.json"),
        ({"annotation_id": 999}, "999"),
        ({"annotation_id": 10}, r"corrections.json': suspects\[0\], image 2: .* annotation 10"),
        ({"annotation_id": None}, "location"),
        ({"image_id": 999}, "image 999"),
        ({"category_id": 4}, "class 4"),
        ({"bbox": [1, 2, 0, 5]}, "location"),
        ({"bbox": [28, 4, 8, 8]}, r"suspects\[0\], image 2: .*32 x 32 pixels"),
    ):
        content = json.loads((tmp_path / "out" / "suspects.json").read_text())
        target = content if change.keys() & content.keys() else content["suspects"][0]
        target.update(change)
        file.write_text(json.dumps(content))
        with pytest.raises(UserError, match=named):
            apply_corrections(file, str(data), tmp_path / "corrected.json")
        assert not (tmp_path / "corrected.json").exists()


def test_two_corrections_of_one_annotation_are_refused(data, tmp_path):
    labels, suspects, _ = inspect_labels(str(data), tmp_path / "out")
    write_suspects(labels, suspects, tmp_path / "out", "")
    content = json.loads((tmp_path / "out" / "suspects.json").read_text())
    moved = next(one for one in content["suspects"] if one["kind"] == "location")
    file, output = tmp_path / "corrections.json", tmp_path / "corrected.json"
    for change in ({"bbox": [21, 4, 8, 8]}, {"kind": "class", "category_id": 3}):
        content["suspects"] = [moved, moved, moved | change]
        file.write_text(json.dumps(content))
        named = r"corrections.json': suspects\[2\], image 2: suspects\[0\] .* annotation 21"
        with pytest.raises(UserError, match=named):
            apply_corrections(file, str(data), output)
        assert not output.exists()


def test_few_images_a_folder_of_others_and_boxes_on_one_image_are_refused(data, tmp_path):
    (tmp_path / "detectors" / "of_others").mkdir(parents=True)
    with pytest.raises(UserError, match="choose another --output"):
        inspect_labels(str(write_data(tmp_path)), tmp_path)
    content = json.loads(data.read_text())
    content["annotations"] = content["annotations"][:3]
    data.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"'{data}'.*one half"):
        inspect_labels(str(data), tmp_path / "out")
    with pytest.raises(UserError, match="9 images"):
        inspect_labels(str(write_data(tmp_path, 9)), tmp_path / "out")


def boxes(*rows):
    """Returns boxes from rows x0, y0, x1, y1, class and, of predictions, score."""
    table = torch.tensor(rows).reshape(-1, len(rows[0]) if rows else 6)
    scores = table[:, 5] if table.shape[1] > 5 else torch.ones(len(table))
    return ImageBoxes(table[:, :4], table[:, 4].long(), scores)


def test_similarity_by_hand():
    first, second = torch.tensor([[0.0, 0, 4, 4]]), torch.tensor([[0.0, 0, 4, 4], [4, 0, 8, 4]])
    found = similarity(first, second)
    # Side by side: no overlap, centres 4 apart, a diagonal of sqrt(8^2 + 4^2).
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.1 * (1 - 4 / 80**0.5)]]))


@pytest.mark.parametrize(
    ("annotated", "kind", "annotation"),
    [
        (((0, 0, 10, 10, 1),), "missing", None),
        (((0, 0, 10, 10, 1), (27, 20, 47, 40, 2)), "location", 1),
        (((0, 0, 10, 10, 1), (20, 20, 40, 40, 1)), "class", 1),
    ],
)
def test_each_kind_of_error_comes_first(annotated, kind, annotation):
    right = boxes((0, 0, 10, 10, 1), (20, 20, 40, 40, 2))
    seen = boxes((0, 0, 10, 10, 1, 0.9), (20, 20, 40, 40, 2, 0.8), (60, 60, 70, 70, 1, 0.1))
    first, *others = find_suspects([right, boxes(*annotated)], [seen, seen])
    assert all(one.score < 1e-6 for one in others if one.box != (60, 60, 70, 70) and one.image == 0)
    assert (first.kind, first.image, first.annotation) == (kind, 1, annotation)
    assert (first.box, first.label) == ((20, 20, 40, 40), 2)


def test_images_without_boxes_or_predictions():
    none = boxes()
    assert find_suspects([none, boxes((0, 0, 1, 1, 0))], [none, none]) == []
    (missing,) = find_suspects([none], [boxes((0, 0, 8, 8, 3, 0.7))])
    assert (missing.kind, missing.score) == ("missing", pytest.approx(0.7))

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Suspects of wrong labels by hand, made errors, the page of suspects, and corrected labels."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from qbheat_det.core.errors import UserError
from qbheat_det.labelling import (
    apply_corrections,
    inspect_labels,
    inspection,
    shortlist,
    write_suspects,
)
from qbheat_det.labelling.labels import ImageBoxes, LabelSuspect
from qbheat_det.labelling.suspects import (
    Suspect,
    calibrate,
    find_suspects,
    keep_one_per_object,
    make_errors,
    similarity,
)
from tests.data.pictures import draw, save
from tests.tool_modules import load_tool, refuse

TOOL = load_tool("inspect_dataset")

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


def test_a_moved_box_is_one_suspect_and_its_missing_neighbour_another():
    # The annotation is 10 px left of its object, which is predicted as two classes. IoU 1/3 and
    # 5/16 with the annotation, 10/11 with each other. The neighbour's IoU with both is 0.
    annotated = boxes((0, 0, 20, 20, 1))
    seen = boxes((10, 0, 30, 20, 1, 0.9), (10, 0, 30, 22, 2, 0.5), (32, 0, 52, 20, 1, 0.2))
    found = find_suspects([annotated], [seen])
    assert [one.kind for one in found] == ["location", "missing", "missing"]
    moved, neighbour = keep_one_per_object(found)
    like = 0.9 / 3 + 0.1 * (1 - 10 / (30**2 + 20**2) ** 0.5)
    assert (moved.kind, moved.annotation, moved.box) == ("location", 0, (10, 0, 30, 20))
    assert moved.score == pytest.approx(0.9 * (1 - like))
    assert (neighbour.kind, neighbour.box) == ("missing", (32, 0, 52, 20))
    # If the duplicate is more probable, it is the one that is kept.
    swapped = keep_one_per_object([found[1], found[0], found[2]])
    assert [one.box for one in swapped] == [(10, 0, 30, 22), (32, 0, 52, 20)]


def test_a_box_is_not_moved_to_the_object_of_another_annotation():
    # The first box has an IoU of 3/7 with the second one and its prediction. Its own object is
    # predicted with a lower score and an IoU of 1/7.
    annotated = boxes((0, 0, 20, 20, 1), (8, 0, 28, 20, 1))
    seen = boxes((8, 0, 28, 20, 1, 0.9), (-15, 0, 5, 20, 1, 0.8))
    found = {(one.kind, one.annotation): one for one in find_suspects([annotated], [seen])}
    moved = found["location", 0]
    like = 0.9 / 7 + 0.1 * (1 - 15 / (35**2 + 20**2) ** 0.5)
    assert (moved.box, moved.score) == ((-15, 0, 5, 20), pytest.approx(0.8 * (1 - like)))
    right = found["location", 1]
    assert (right.box, right.score) == ((8, 0, 28, 20), pytest.approx(0, abs=1e-6))
    # Without its own prediction, it is not moved at all.
    only = boxes((8, 0, 28, 20, 1, 0.9))
    assert ("location", 0) not in {
        (one.kind, one.annotation) for one in find_suspects([annotated], [only])
    }


def test_two_classes_and_a_duplicate_of_a_missing_object_are_one_suspect():
    # IoU 1 and 4/5 with the first box; the last box has an IoU of 1/4 with it.
    seen = boxes(
        (0, 0, 10, 10, 1, 0.8),
        (0, 0, 10, 10, 2, 0.6),
        (0, 0, 10, 8, 1, 0.4),
        (6, 0, 16, 10, 1, 0.2),
    )
    found = find_suspects([boxes()], [seen])
    assert len(found) == 4
    kept = keep_one_per_object(found)
    assert [(one.box, one.label) for one in kept] == [((0, 0, 10, 10), 1), ((6, 0, 16, 10), 1)]


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        # Two annotations with the same predicted box.
        (("location", 0, (0, 0, 10, 10)), ("location", 1, (0, 0, 10, 10)), True),
        (("class", 0, (0, 0, 10, 10), (2, 0, 12, 10)), ("class", 1, (0, 0, 10, 10)), True),
        # One annotation with two predicted boxes.
        (("location", 0, (0, 0, 10, 10)), ("class", 0, (50, 0, 60, 10), (5, 0, 15, 10)), True),
        # A missing box on the annotated (IoU 9/11) or the predicted box (IoU 2/3) of a wrong class.
        (("class", 0, (6, 0, 16, 10), (0, 0, 10, 10)), ("missing", None, (1, 0, 11, 10)), True),
        (("class", 0, (0, 0, 10, 10), (6, 0, 16, 10)), ("missing", None, (2, 0, 12, 10)), True),
        # IoU of exactly 1/2, then just below.
        (("missing", None, (0, 0, 10, 10)), ("location", 0, (0, 0, 10, 5)), True),
        (("missing", None, (0, 0, 10, 10)), ("location", 0, (0, 0, 10, 4.9)), False),
        # Two annotated objects that overlap, each with a prediction of another class.
        (("class", 0, (0, 0, 10, 10)), ("class", 1, (1, 0, 11, 10)), False),
    ],
)
def test_suspects_of_one_object_exclude_each_other(first, second, is_one):
    def suspect(image, kind, annotation, box, correction=None):
        return Suspect(kind, image, 0.5, annotation, box, 1, correction or box)

    for order in ((first, second), (second, first)):
        pair = [suspect(0, *one) for one in order]
        assert keep_one_per_object(pair) == (pair[:1] if is_one else pair)
        apart = [suspect(image, *one) for image, one in enumerate(order)]
        assert keep_one_per_object(apart) == apart


def test_calibrated_suspects_have_one_annotation_and_one_box_each(data, tmp_path):
    _, suspects, _ = inspect_labels(str(data), tmp_path / "out")
    annotations = [one.annotation_id for one in suspects if one.annotation_id is not None]
    assert len(set(annotations)) == len(annotations)
    assert [one.score for one in suspects] == sorted((s.score for s in suspects), reverse=True)


def suspects_with(*probabilities):
    return [
        LabelSuspect("missing", score, 1, "1.png", None, 3, "fish", (4, 4, 8, 8))
        for score in probabilities
    ]


def test_the_suspects_worth_a_look_are_listed():
    many = suspects_with(*np.linspace(1, 0.01, 1000).tolist())
    assert shortlist(many) == many[:200]
    assert shortlist(many, 300) == many[:300]
    some = suspects_with(*[0.5] * 30, *[0.1] * 20, *[0.0999] * 30)
    assert shortlist(some) == some[:50]
    assert shortlist(some, 1) == some[:1]
    few = suspects_with(*[0.5] * 3, *[0.02] * 40)
    assert shortlist(few) == few[:20]
    assert shortlist(few[:5]) == few[:5]
    assert shortlist([]) == []


def test_the_command_twice_into_one_folder_keeps_the_corrections(data, tmp_path, capsys):
    folder = tmp_path / "out"
    words = ["--labels", "--data", str(data), "--output", str(folder)]
    assert TOOL.main(words) == 0
    out = capsys.readouterr().out
    found = inspect_labels(str(data), tmp_path / "again")[1]
    listed = json.loads((folder / "suspects.json").read_text())["suspects"]
    assert len(listed) == len(shortlist(found))
    assert f"{len(listed):,} of {len(found):,} " in out
    assert "replace" not in out
    shutil.copy(folder / "suspects.json", folder / "corrections.json")
    before = (folder / "corrections.json").read_bytes()

    assert TOOL.main([*words, "--most", "1"]) == 0
    out = capsys.readouterr().out
    for name in ("suspects.json", "suspects.html"):
        assert name in next(line for line in out.splitlines() if "replace" in line)
    assert f"1 of {len(found):,} " in out
    (one,) = json.loads((folder / "suspects.json").read_text())["suspects"]
    assert one == listed[0]
    page = (folder / "suspects.html").read_text()
    assert page.count("data:image/jpeg") == 1
    assert f"1 of {len(found):,} " in page
    assert (folder / "corrections.json").read_bytes() == before
    summary = apply_corrections(folder / "corrections.json", str(data), tmp_path / "new.json")
    assert summary.startswith("1 box added")


@pytest.mark.parametrize("words", [["--labels", "--most", "0"], ["--most", "3"]])
def test_most_needs_labels_and_a_positive_number(words, capsys):
    assert "--most" in refuse(TOOL.main, [*words, "--data", "x.json"], capsys)

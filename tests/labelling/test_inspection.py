# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The inspection of a data set, the page of suspects, and corrected labels."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.ops import box_iou

from qbheat_det.core.errors import UserError
from qbheat_det.labelling import (
    apply_corrections,
    inspect_labels,
    inspection,
    shortlist,
    write_suspects,
)
from qbheat_det.labelling.appearance import Judgement, Judgements, shift_boxes
from qbheat_det.labelling.labels import ImageBoxes, LabelSuspect
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
    monkeypatch.setattr(inspection, "encode_files", lambda encoder, paths: [()] * len(paths))
    monkeypatch.setattr(inspection, "judge_boxes", judge)
    return path


def judge(images, annotated, predicted, category_ids, seed):
    """Judges boxes like features that know the true boxes and classes."""
    assert len(images) == len(annotated)
    truth = ImageBoxes(torch.tensor(BOXES).double(), torch.tensor([3, 5, 3]), torch.ones(3))
    truth.boxes[:, 2:] += truth.boxes[:, :2]
    copies = [shift_boxes(own, np.random.default_rng(seed)) for own in annotated]

    def judge_image(own):
        misfit = torch.full((len(own.boxes),), 2.0)
        logs = torch.full((len(own.boxes), 2), 0.5).log()
        fits, rows = box_iou(own.boxes, truth.boxes).max(dim=1)
        for index, row in enumerate(rows):
            if fits[index] > 0.9:
                misfit[index] = -2.0
                is_class = torch.tensor(category_ids) == truth.classes[row]
                logs[index] = torch.where(is_class, 0.9, 0.1).log()
        return Judgement(logs.double(), misfit.double())

    groups = (annotated, copies, predicted)
    return Judgements(*[[judge_image(own) for own in group] for group in groups], copies)


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


def test_boxes_of_classes_that_are_not_annotated_are_not_missing(data, tmp_path):
    _, suspects, _ = inspect_labels(str(data), tmp_path / "all")
    assert next(one.image_id for one in suspects if one.kind == "missing") == 3
    others = [one for one in suspects if one.image_id != 3]
    content = json.loads(data.read_text())
    content["images"][2]["annotated_category_ids"] = [5]
    data.write_text(json.dumps(content))
    labels, suspects, _ = inspect_labels(str(data), tmp_path / "some")
    assert [one for one in suspects if one.image_id == 3] == []
    assert [(one.kind, one.annotation_id) for one in suspects] == [
        (one.kind, one.annotation_id) for one in others
    ]
    write_suspects(labels, suspects, tmp_path / "some", "")
    corrected = tmp_path / "corrected.json"
    apply_corrections(tmp_path / "some" / "suspects.json", str(data), corrected)
    assert json.loads(corrected.read_text())["images"] == content["images"]


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
    assert f"of {len(found):,} candidates" in page
    assert (folder / "corrections.json").read_bytes() == before
    summary = apply_corrections(folder / "corrections.json", str(data), tmp_path / "new.json")
    assert summary.startswith("1 box added, 1 moved, 1 given another class, 0 removed.")


@pytest.mark.parametrize("words", [["--labels", "--most", "0"], ["--most", "3"]])
def test_most_needs_labels_and_a_positive_number(words, capsys):
    assert "--most" in refuse(TOOL.main, [*words, "--data", "x.json"], capsys)

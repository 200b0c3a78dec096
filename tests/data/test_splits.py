# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The images that are held out if no validation set is given."""

import json
from collections import Counter
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import forget_annotations, open_source, register_source, split_source
from qbheat_det.data.datasets.sources import choose_val, forget_source

from .format_cases import BOXES, write, write_yolo

NAME = "a source that is split"


@pytest.fixture(autouse=True)
def _clean():
    yield
    forget_source(NAME)
    forget_annotations()


def test_a_fifth_is_held_out_in_the_proportions_of_the_classes():
    groups = ["cat"] * 50 + ["dog"] * 25 + ["cow"] + [None] * 24
    chosen = choose_val(groups, fraction=0.2, seed=1)
    counts = Counter(groups[index] for index in chosen)
    assert counts["cow"] == 0  # the only image of a class is trained on
    for group, expected in (("cat", 10), ("dog", 5), (None, 4.8)):
        assert abs(counts[group] - expected) <= 1
    assert choose_val(groups, fraction=0.2, seed=1) == chosen
    assert choose_val(groups, fraction=0.2, seed=2) != chosen


def test_parts_of_a_split_are_disjoint_in_boxes_and_ground_truth(tmp_path):
    source = open_source(str(write_yolo(tmp_path, more="de"))).train
    split = split_source(source, fraction=0.2, seed=0)
    names = {part: set(split[part]) for part in ("train", "val")}
    assert sorted(names["train"] | names["val"]) == [f"train/images/{s}.jpg" for s in "abcde"]
    assert names["train"].isdisjoint(names["val"])
    file = write(tmp_path / "split.json", json.dumps(split))
    for part in names:
        register_source(NAME, {**source, "split": {"file": str(file), "part": part}})
        paths = [record["file_name"] for record in DatasetCatalog.get(NAME)]
        assert {str(Path(path).relative_to(tmp_path)) for path in paths} == names[part]
        truth = json.loads(Path(MetadataCatalog.get(NAME).json_file).read_text())
        assert len(truth["images"]) == len(names[part])
        boxes = [BOXES.get(Path(name).stem, BOXES["a"]) for name in names[part]]
        assert len(truth["annotations"]) == sum(map(len, boxes))
    write(file, "[]")
    with pytest.raises(UserError, match=r"split\.json"):
        register_source(NAME, {**source, "split": {"file": str(file), "part": "val"}})

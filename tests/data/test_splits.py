# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The images that are held out if no validation set is given."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image

from qbheat_det.core.errors import UserError
from qbheat_det.data import open_source, read_annotations, register_source, split_source
from qbheat_det.data.datasets.registration import forget_source
from qbheat_det.data.datasets.splits import SeenImages, choose_val, fingerprint_images, read_split

from .format_cases import BOXES, write, write_yolo

NAME = "a source that is split"


@pytest.fixture(autouse=True)
def _clean():
    yield
    forget_source(NAME)


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
    split = split_source(source, read_annotations(source), fraction=0.2)
    names = {part: set(split[part]) for part in ("train", "val")}
    assert sorted(names["train"] | names["val"]) == [f"train/images/{s}.jpg" for s in "abcde"]
    assert names["train"].isdisjoint(names["val"])
    file = write(tmp_path / "split.json", json.dumps(split))
    for part in names:
        register_source(NAME, source, keep=read_split(file)[part])
        paths = [record["file_name"] for record in DatasetCatalog.get(NAME)]
        assert {str(Path(path).relative_to(tmp_path)) for path in paths} == names[part]
        truth = json.loads(Path(MetadataCatalog.get(NAME).json_file).read_text())
        assert len(truth["images"]) == len(names[part])
        boxes = [BOXES.get(Path(name).stem, BOXES["a"]) for name in names[part]]
        assert len(truth["annotations"]) == sum(map(len, boxes))
    write(file, "[]")
    with pytest.raises(UserError, match=r"split\.json"):
        read_split(file)


def test_images_that_weights_have_seen_keep_their_side_under_other_names(tmp_path):
    stems = "defghijk"
    source = open_source(str(write_yolo(tmp_path / "old", more=stems))).train
    for path in sorted((tmp_path / "old/train/images").iterdir()):
        Image.new("RGB", (40, 20), (ord(path.stem) * 21 % 256, ord(path.stem) * 77 % 256, 9)).save(
            path
        )
    split = split_source(source, read_annotations(source), fraction=0.3)
    parts = {
        part: [str(tmp_path / "old" / name) for name in split[part]] for part in ("train", "val")
    }
    prints = {part: fingerprint_images(paths).values() for part, paths in parts.items()}
    SeenImages().extend(prints["train"], prints["val"]).write(tmp_path)
    seen = SeenImages.read(tmp_path)
    assert (len(seen.train), len(seen.val)) == (len(parts["train"]), len(parts["val"]))
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    renamed = {}
    for kind, suffix in (("images", ".jpg"), ("labels", ".txt")):
        for path in (tmp_path / "new/train" / kind).iterdir():
            renamed[f"train/images/{path.stem}.jpg"] = f"train/images/photo_{path.stem}.jpg"
            path.rename(path.with_name(f"photo_{path.stem}{suffix}"))
    for stem in "xyz":  # images that the weights have not seen
        Image.new("RGB", (40, 20), (0, ord(stem), 0)).save(
            tmp_path / f"new/train/images/{stem}.jpg"
        )
    new = open_source(str(tmp_path / "new/data.yaml")).train
    again = split_source(new, read_annotations(new), fraction=0.3, seen=seen)
    for part in ("train", "val"):
        assert {renamed[name] for name in split[part]} <= set(again[part])
    fresh = {f"train/images/{stem}.jpg" for stem in "xyz"}
    assert fresh <= {*again["train"], *again["val"]}
    both = SeenImages(frozenset({"a"}), frozenset({"b"})).extend({"c"}, {"a", "d"})
    assert both == SeenImages(frozenset({"a", "c"}), frozenset({"b", "d"}))

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Several --data: joined, held out, trained on and evaluated; and what is refused."""

import json
import logging
import shutil

import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.analysis.run import Run
from qbheat_det.core.errors import UserError
from qbheat_det.engine import RunFlags, Trainer, assemble_run, setup
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES
from tests.tool_modules import load_tool
from tests.toy_set import draw_toy_set

from .classifier_cases import make_classes
from .tiny_training import CONFIG, TINY, assemble, parse_run, run_tool, words_of

QUICK = {**TINY, "SOLVER.MAX_ITER": "1", "SOLVER.CHECKPOINT_PERIOD": "1", "MODEL.DEVICE": "cpu"}
FIRST = ["shape 1", "shape 2", "shape 4"]
SECOND = ["shape 4", "shape 9", "shape 7"]
CLASSES = ["shape 1", "shape 2", "shape 4", "shape 7", "shape 9"]  # COCO files are sorted by id


@pytest.fixture
def sets(tmp_path, monkeypatch):
    """Works in a folder with two sets: "a" has a validation part, and "b.json" has none."""
    monkeypatch.chdir(tmp_path)
    toy = draw_toy_set(tmp_path, 20)
    content = json.loads((toy / "annotations.json").read_text())

    def write(path, numbers, names):
        path.parent.mkdir(parents=True, exist_ok=True)
        categories = [one for one in content["categories"] if one["name"] in names]
        ids = [one["id"] for one in categories]
        lists = {
            "images": [one for one in content["images"] if one["id"] in numbers],
            "annotations": [
                one
                for one in content["annotations"]
                if one["image_id"] in numbers and one["category_id"] in ids
            ],
            "categories": categories,
        }
        path.write_text(json.dumps(lists))
        for image in lists["images"]:
            shutil.copy(toy / "images" / image["file_name"], path.parent)

    write(tmp_path / "a" / "train" / "_annotations.coco.json", range(1, 7), FIRST)
    write(tmp_path / "a" / "valid" / "_annotations.coco.json", range(7, 9), FIRST)
    write(tmp_path / "b" / "b.json", range(9, 21), SECOND)
    return tmp_path


def parse(words, **opts):
    return parse_run(CONFIG, {**QUICK, **opts}, *words.split())


def list_images(name):
    return {record["file_name"] for record in DatasetCatalog.get(name)}


def test_sets_are_joined_and_those_without_a_validation_part_are_divided(sets):
    words = "--data a --data b/b.json --output run"
    stage = assemble(parse(words))
    assert stage.cfg.MODEL.CLASS_NAMES == CLASSES
    records = DatasetCatalog.get("custom_train")
    for record in records:
        is_first = record["file_name"].startswith(f"{sets}/a/train/")
        assert record[ANNOTATED_CLASSES] == ([0, 1, 2] if is_first else [2, 3, 4])
    train, val = list_images("custom_train"), list_images("custom_val")
    assert not train & val
    own_val = {f"{sets}/a/valid/{number:06d}.jpg" for number in (7, 8)}
    held_out = val - own_val
    assert own_val < val
    assert len(held_out) in (2, 3)
    assert all(path.startswith(f"{sets}/b/") for path in held_out)
    assert len(train) == 6 + 12 - len(held_out)

    setup(stage)
    text = (sets / "run" / "log.txt").read_text()
    assert f"{len(held_out)} images are held out" in text
    assert f"Used of '{sets}/a': 8 images" in text
    assert f"Used of '{sets}/b/b.json': 12 images" in text
    assert f"custom_train: of {len(train)} images, annotated for shape 1 6, " in text
    written = json.loads((sets / "run" / "split.json").read_text())
    assert set(written["train"]) == train
    assert set(written["val"]) == val
    assert written["data"] == [f"{sets}/a", f"{sets}/b/b.json"]
    batch = next(iter(Trainer.build_train_loader(stage.cfg)))
    assert all(len(image[ANNOTATED_CLASSES]) == 3 for image in batch)
    loader = Trainer.build_test_loader(stage.cfg, "custom_val")
    assert all(ANNOTATED_CLASSES in image for batch in loader for image in batch)

    assemble(parse(f"{words} --resume", SEED="7"))
    assert (list_images("custom_train"), list_images("custom_val")) == (train, val)
    assemble(parse(words, **{"DATASETS.VAL_FRACTION": "0"}))
    assert list_images("custom_val") == own_val


def write_reversed(path, written):
    """Writes a COCO file with all ``CLASSES`` in the reverse order."""
    content = json.loads(path.read_text())
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    ids = {name: number for number, name in enumerate(reversed(CLASSES), start=1)}
    content["categories"] = [{"id": number, "name": name} for name, number in ids.items()]
    for box in content["annotations"]:
        box["category_id"] = ids[names[box["category_id"]]]
    written.write_text(json.dumps(content))


def test_a_run_is_recorded_and_evaluated_on_all_sets_or_one(sets):
    words = ["--config-file", CONFIG, "--data", "a", "--data", "b/b.json", "--output", "run"]
    results = run_tool([*words, *words_of(QUICK)])["bbox"]
    split = json.loads((sets / "run" / "split.json").read_text())
    run = Run.open(sets / "run")
    for part, split_part in (("train", "train"), ("test", "val")):
        assert list_images(run.find_set(part)) == set(split[split_part])
    assert MetadataCatalog.get(run.find_set("test")).thing_classes == CLASSES

    weights = ["--eval-only", "--weights", "run", "MODEL.DEVICE", "cpu"]
    again = run_tool([*weights, "--data", "a", "--data", "b/b.json"])["bbox"]
    np.testing.assert_equal(again, results)
    of_second = run_tool([*weights, "--data", "b/b.json"])["bbox"]
    assert list_images("custom_val") == {one for one in split["val"] if "/b/" in one}
    assert MetadataCatalog.get("custom_val").thing_classes == CLASSES
    assert np.isnan(of_second["AP-shape 1"])
    write_reversed(sets / "b" / "b.json", sets / "b" / "reversed.json")
    of_reversed = run_tool([*weights, "--data", "b/reversed.json"])["bbox"]
    assert MetadataCatalog.get("custom_val").thing_classes == CLASSES
    assert np.isnan(of_reversed["AP-shape 1"])
    assert not np.isnan(of_reversed["AP-shape 9"])

    # A second run from these weights has no image on the other side.
    assemble(parse("--data b/b.json --weights run --output second", SEED="7"))
    assert not list_images("custom_train") & set(split["val"])


def test_copies_of_an_image_get_the_labels_of_all_sets_and_one_side(sets):
    """They are known by their content. The one in a validation part decides about the side."""
    content = json.loads((sets / "b" / "b.json").read_text())
    for number, name in ((9, "train/000001.jpg"), (10, "valid/000007.jpg")):
        shutil.copy(sets / "a" / name, sets / "b" / f"{number:06d}.jpg")
    data = assemble(parse("--data a --data b/b.json")).data
    assert data.shared == ""
    for name, copied, number in (("custom_train", "train/000001.jpg", 9),
                                 ("custom_val", "valid/000007.jpg", 10)):  # fmt: skip
        assert f"{sets}/b/{number:06d}.jpg" not in list_images(name)
        (record,) = [
            one for one in DatasetCatalog.get(name) if one["file_name"] == f"{sets}/a/{copied}"
        ]
        assert ANNOTATED_CLASSES not in record  # all of them
        added = [one for one in content["annotations"] if one["image_id"] == number]
        new = [one for one in record["annotations"] if one["category_id"] > 2]
        assert len(new) == sum(one["category_id"] > 4 for one in added)
    one = json.loads(json.dumps({**content, "images": content["images"][:1]}))
    one["annotations"] = [box for box in one["annotations"] if box["image_id"] == 9]
    (sets / "b" / "b.json").write_text(json.dumps(one))  # all of its images are in "a"
    split = assemble(parse("--data a --data b/b.json")).data.split
    assert (split["num_held_out"], len(split["train"]), len(split["val"])) == (0, 6, 2)
    notes = [note for account in data.accounts.values() for note in account.notes]
    assert sum("in several data sets" in note for note in notes) == 2


@pytest.mark.parametrize("fraction", ["0.2", "0"])
def test_an_image_in_both_parts_of_two_sets_is_validated_on_with_the_labels_of_both(fraction, sets):
    """Also if all sets have validation parts, and the copies have other names."""
    content = json.loads((sets / "b" / "b.json").read_text())
    for part, numbers in (("train", range(9, 16)), ("valid", range(16, 21))):
        folder = sets / "c" / part
        folder.mkdir(parents=True)
        images = [one for one in content["images"] if one["id"] in numbers]
        boxes = [one for one in content["annotations"] if one["image_id"] in numbers]
        lists = {**content, "images": images, "annotations": boxes}
        (folder / "_annotations.coco.json").write_text(json.dumps(lists))
        for image in images:
            shutil.copy(sets / "b" / image["file_name"], folder)
    shutil.copy(sets / "a" / "valid" / "000007.jpg", sets / "c" / "train" / "000010.jpg")
    shutil.copy(sets / "a" / "train" / "000002.jpg", sets / "c" / "valid" / "000017.jpg")
    flags = "--data a --data c --output run"
    data = assemble(parse(flags, **{"DATASETS.VAL_FRACTION": fraction})).data
    assert data.shared == ""
    assert data.split["num_held_out"] == 0
    train, val = list_images("custom_train"), list_images("custom_val")
    assert (len(train), len(val)) == (6 + 7 - 2, 2 + 5)
    assert not {f"{sets}/a/train/000002.jpg", f"{sets}/c/train/000010.jpg"} & (train | val)
    records = {record["file_name"]: record for record in DatasetCatalog.get("custom_val")}
    assert ANNOTATED_CLASSES not in records[f"{sets}/a/valid/000007.jpg"]  # all of them
    assert ANNOTATED_CLASSES not in records[f"{sets}/c/valid/000017.jpg"]
    notes = [note for account in data.accounts.values() for note in account.notes]
    assert sum("1 training images of" in note and "only" in note for note in notes) == 2

    words = [*flags.split()[:4], "--output", "inspection", "--num-samples", "0"]
    assert load_tool("inspect_dataset").main(words) == 0
    logging.disable(logging.NOTSET)  # the tool hides warnings

    results = run_tool(["--config-file", CONFIG, *flags.split(), *words_of(QUICK)])["bbox"]
    run = Run.open(sets / "run")
    assert list_images(run.find_set("train")) == train
    assert list_images(run.find_set("test")) == val
    weights = ["--eval-only", "--weights", "run", "MODEL.DEVICE", "cpu"]
    again = run_tool([*weights, "--data", "a", "--data", "c"])["bbox"]
    np.testing.assert_equal(again, results)

    for part in ("train", "valid"):
        shutil.copytree(sets / "a" / part, sets / "d" / ("train" if part == "valid" else "valid"))
    shutil.rmtree(sets / "c" / "train")
    with pytest.raises(UserError, match="all training images"):
        assemble(parse("--data a --data d"))


def test_inspection_speaks_of_all_sets(sets, capsys):
    shutil.copy(sets / "a" / "valid" / "000007.jpg", sets / "b" / "000010.jpg")
    words = ["--data", "a", "--data", "b/b.json", "--output", "inspection", "--num-samples", "0"]
    assert load_tool("inspect_dataset").main(words) == 0  # the copy is no training image
    logging.disable(logging.NOTSET)  # the tool hides warnings
    text = capsys.readouterr().out
    assert "Used: 20 images" in text
    assert "train: of 18 images, annotated for shape 1 6, " in text
    assert f"Training holds out 20% of '{sets}/b/b.json'." in text


def test_synonyms_and_validation_data_of_some_classes(sets):
    (sets / "map.yaml").write_text("shape 9: shape 1\n")
    words = "--data a --data b/b.json --val b/b.json --class-map map.yaml"
    stage = assemble(parse(words))
    assert stage.cfg.MODEL.CLASS_NAMES == ["shape 1", "shape 2", "shape 4", "shape 7"]
    assert {tuple(one[ANNOTATED_CLASSES]) for one in DatasetCatalog.get("custom_val")} == {
        (0, 2, 3)
    }
    flags = RunFlags(
        config_file=CONFIG,
        data=["a", "b/b.json"],
        val=["b/b.json"],
        class_map={"shape 9": "shape 1"},
        opts=words_of(QUICK),
    )
    assert assemble_run(flags)[-1].cfg == stage.cfg


BAD = [
    ("--data a --data ./a", "'./a' twice|'a' twice"),
    ("--data a --data b/b.json --images b", "2 --data, but 1 --images"),
    ("--data a --val b/b.json --val a --val-images b", "2 --val, but 1 --val-images"),
    ("--data a --data nowhere", "'nowhere'"),
    ("--data a --data TRAIN", "'TRAIN' has"),
    ("--data a --data b/b.json --class-map map.yaml", "no data set has the class 'shape 5'"),
    ("--data a --val b/b.json --val a", "'shape 7', 'shape 9', which is none of"),
    ("--class-map map.yaml", "--class-map"),
]


@pytest.mark.parametrize("class_map", [["shape 9"], {"shape 9": 1}, {9: "shape 1"}])
def test_a_class_map_without_names_is_refused(class_map):
    with pytest.raises(UserError, match="class_map"):
        RunFlags(class_map=class_map).read_class_map()


@pytest.mark.parametrize(("words", "named"), BAD)
def test_what_is_unclear_is_named(words, named, sets):
    make_classes(sets / "TRAIN", {"ape": 1, "bee": 2})
    (sets / "map.yaml").write_text("shape 5: shape 1\n")
    with pytest.raises(UserError, match=named):
        assemble(parse(words))


def test_several_sets_are_for_detectors(sets):
    make_classes(sets / "TRAIN", {"ape": 1, "bee": 2})
    make_classes(sets / "MORE", {"ape": 1, "bee": 2})
    with pytest.raises(UserError, match="for detectors"):
        assemble_run(RunFlags(data=["TRAIN", "MORE"]))

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Flags that name data: sets that they make, what is refused, and what an older run left."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.data import SeenImages, Source, fingerprint_images, register_coco_json
from qbheat_det.data.datasets import CELLS
from qbheat_det.engine import RunFlags, Trainer, assemble_run, setup

from .classifier_cases import make_classes
from .tiny_pretraining import RECIPE, make_folder
from .tiny_training import CONFIG, assemble, build_config, parse_run

PRETRAIN = "INPUT.DATASET_MAPPER_NAME pretrain DATALOADER.ASPECT_RATIO_GROUPING False"
CLASSIFY = get_config_path("objectives/supervised.yaml")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Works in a folder with small sets of images; sets of classes are in capitals."""
    monkeypatch.chdir(tmp_path)
    make_folder(Path("one"), 2)
    make_folder(Path("two"), 3)
    Path("empty").mkdir()
    make_classes(Path("TRAIN"), {"ape": 1, "bee": 2})
    make_classes(Path("VAL"), {"bee": 1})
    make_classes(Path("ONE"), {"ape": 1})
    make_classes(Path("OTHER"), {"ape": 1, "yak": 1})
    content = {"images": [{"id": 1, "file_name": "1.jpg"}]}
    Path("images.json").write_text(json.dumps(content))
    Path("notes.txt").touch()


def configure(words, config=CONFIG):
    return assemble(parse_run(config, {}, *words.split())).cfg


def test_folders_are_all_that_is_trained_on_and_are_recorded(tmp_path):
    older = "DATASETS.TEST ('custom_val_images',)"  # a set that another run's flags made
    words = f"--images one --images two {older} {PRETRAIN}"
    stage = assemble(parse_run(CONFIG, {}, *words.split()))
    cfg = stage.cfg
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("custom_images",), ())
    assert cfg.MODEL.CLASS_NAMES == []
    assert Trainer.build_train_loader(cfg).num_images == 5
    folders = [str(tmp_path / name) for name in ("one", "two")]
    (data_set,) = stage.data.given
    assert data_set.source == Source("images", folders[0], folders=tuple(folders), labelled=False)


def test_an_annotation_file_gives_its_images_without_a_set_to_evaluate_on():
    cfg = configure(f"--data images.json --images one {PRETRAIN}")
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("custom_images",), ())
    (record,) = DatasetCatalog.get("custom_images")
    assert Path(record["file_name"]) == Path("one/1.jpg").absolute()


def test_python_says_what_the_command_line_does(tmp_path):
    words = f"--data TRAIN --val VAL --output {tmp_path}/run SOLVER.EPOCHS 2.0 SEED 1"
    flags = RunFlags(config_file=CLASSIFY, data="TRAIN", val="VAL", output=f"{tmp_path}/run",
                     opts=["SOLVER.EPOCHS", 2.0, "SEED", 1])  # fmt: skip
    assert build_config(flags) == configure(words, CLASSIFY)
    assert build_config(flags).OUTPUT_DIR == f"{tmp_path}/run"


BAD_IMAGES = {
    "--images nowhere": "nowhere'",
    "--images one/0.jpg": r"one/0\.jpg",
    "--images one DATASETS.TRAIN ('a',)": r"DATASETS\.TRAIN",
    "--data images.json --images one --images two": "--images of --data",
    "--val-images one DATASETS.TEST ('a',)": r"DATASETS\.TEST",
    "DATASETS.TRAIN ('imagenet_train',)": "imagenet_train.*DETECTRON2_DATASETS",
    "--data nowhere.json --images one": r"nowhere\.json",
    "--data images.json --images two/2.jpg": r"two/2\.jpg",
    "--data images.json": "--images",
    "DATASETS.TRAIN ('custom_images',) DATASETS.TEST ()": "--images",
}
BAD_BOXES = {
    "--images one": "--data",
    "--data TRAIN": "'TRAIN'",
    "--val images.json --val-images one": "--eval-only",
    "--data one": "/one'",
    "--data notes.txt": "/notes.txt'",
    "--weights a.pth MODEL.WEIGHTS b.pth": "--weights",
}
BAD_CLASSES = {
    "--data nowhere": "'nowhere'",
    "--data empty": "/empty'",
    "--data one": "/one'",
    "--data ONE": "--val",
    "--data ONE DATASETS.VAL_FRACTION 0": "'ape'",
    "--val VAL": "--eval-only",
    "--data TRAIN --val OTHER": "yak",
    "--data TRAIN --images VAL": "'VAL'",
    "--data TRAIN --val images.json --val-images one": r"'images\.json'",
    "--data TRAIN DATASETS.TRAIN ('a',)": r"DATASETS\.TRAIN and --data",
    "--data TRAIN --val VAL MODEL.CLASSIFIER.NUM_CLASSES 9": "NUM_CLASSES is 9",
    "--data TRAIN DATASETS.VAL_FRACTION 1.5": "VAL_FRACTION",
    "--images TRAIN": "--data",
    "": "imagenet_train.*--data",
    "DATASETS.TRAIN ()": "--data",
}

BAD_EVALUATIONS = {
    "--eval-only DATASETS.TEST ()": "--val-images",
    "--images one DATASETS.TEST ('cells_sample_val',)": "'cells_sample_val'",
    "--images one --val-images two MODEL.META_ARCHITECTURE MoCo": "MoCo",
}
BAD = [
    *((f"{words} {PRETRAIN}", named, CONFIG) for words, named in BAD_IMAGES.items()),
    *((words, named, CONFIG) for words, named in BAD_BOXES.items()),
    *((words, named, CLASSIFY) for words, named in BAD_CLASSES.items()),
    *((words, named, RECIPE) for words, named in BAD_EVALUATIONS.items()),
]


@pytest.mark.parametrize(("words", "named", "config"), BAD)
def test_bad_flags_are_named(words, named, config):
    with pytest.raises(UserError, match=named):
        configure(words, config)


def test_labels_without_some_of_the_classes_to_evaluate_train_on_all_of_them(tiny_data, caplog):
    """At the start, an export of Label Studio has only the classes that were drawn."""
    file = tiny_data / "annotations.json"
    names = [entry["name"] for entry in json.loads(file.read_text())["categories"]]
    (photo, *_) = (tiny_data / "images").iterdir()
    box = {"x": 25, "y": 20, "width": 50, "height": 60, "rectanglelabels": [names[-1]]}
    task = {"data": {"image": str(photo)}, "annotations": [{"result": [{"value": box}]}]}
    Path("export.json").write_text(json.dumps([task]))
    configure(f"--data export.json --images {photo.parent} --val {file}")
    assert "1 of 12 validation images are training images" in caplog.text
    found = [MetadataCatalog.get(f"custom_{part}").thing_classes for part in ("train", "val")]
    assert found == [names, names]
    (record,) = DatasetCatalog.get("custom_train")
    assert record["annotations"][0]["category_id"] == len(names) - 1


def test_a_fifth_is_held_out_written_down_and_the_same_for_all_seeds(tmp_path):
    make_classes(Path("MANY"), {"ape": 10, "bee": 5})
    words = f"--data MANY --output {tmp_path}/run SEED"
    stage = assemble(parse_run(CLASSIFY, {}, *f"{words} 1".split()))
    cfg = stage.cfg
    setup(stage)
    split = json.loads(Path("run/split.json").read_text())
    assert [len(split[part]) for part in ("train", "val")] == [12, 3]

    def held_out(cfg):
        (name,) = cfg.DATASETS.TEST
        return {record["file_name"] for record in DatasetCatalog.get(name)}

    first = held_out(cfg)
    assert first == {f"{tmp_path}/MANY/{name}" for name in split["val"]}
    assert Trainer.build_train_loader(cfg).num_images == 12
    source = stage.data.given[1].source
    assert (source.split_file, source.split_part) == (f"{tmp_path}/run/split.json", "val")
    assert held_out(configure(f"{words} 2", CLASSIFY)) == first
    assert configure(f"{words} 1 DATASETS.VAL_FRACTION 0", CLASSIFY).DATASETS.TEST == ()


def test_a_run_that_was_stopped_in_its_first_stage_keeps_its_split():
    make_classes(Path("MANY"), {"ape": 10, "bee": 5})
    flags = RunFlags(config_file=CLASSIFY, data="MANY", output="run", opts=["SEED", 1])
    split = assemble(flags).data.split
    earlier = {**split, "train": split["train"][:-1]}  # before an image was added
    file = Path("run/first_stage/split.json")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(earlier))
    assert assemble(flags).data.split == split
    assert assemble(dataclasses.replace(flags, resume=True)).data.split == earlier


def test_a_stage_has_its_own_data_after_another_run_was_assembled():
    make_classes(Path("MANY"), {"ape": 10, "bee": 5})
    one = assemble(RunFlags(config_file=CLASSIFY, data="TRAIN", val="VAL", output="one"))
    assemble(RunFlags(config_file=CLASSIFY, data="MANY", output="two"))
    setup(one)
    assert Trainer.build_train_loader(one.cfg).num_images == 3
    assert len(DatasetCatalog.get("custom_labelled_val")) == 1


def test_sets_that_the_user_registers_under_our_names_are_used():
    name = "custom_train"
    register_coco_json(name, CELLS / "train.json", CELLS)
    opts = ["DATASETS.TRAIN", f"('{name}',)", "DATASETS.TEST", "()"]
    assert assemble(RunFlags(config_file=CONFIG, opts=opts)).data.train == (name,)


def test_both_stages_keep_images_away_that_the_first_weights_have_seen(tiny_data, tmp_path):
    file = str(tiny_data / "annotations.json")
    names = sorted(str(path) for path in (tiny_data / "images").iterdir())
    seen = SeenImages(frozenset(fingerprint_images(names[:3]).values()), frozenset())
    seen.write(tmp_path)
    weights = tmp_path / "model.pth"
    torch.save({"model": {}}, weights)
    base = get_config_path(RETINANET)
    first = tmp_path / "first.yaml"
    first.write_text(f"_BASE_: {base}\nMODEL: {{WEIGHTS: {weights}}}\n")
    opts = ["SOLVER.FIRST_STAGE", str(first), "DATASETS.VAL_FRACTION", 0.5]
    flags = RunFlags(config_file=base, data=file, output="two", opts=opts)
    data = assemble_run(flags)[-1].data
    assert not data.seen.val & seen.train
    assert len(data.seen.val) == data.given[1].num_images > 0


RETINANET = "quick_schedules/retinanet_285M_cells.yaml"
MASK_RCNN = "coco/mask_rcnn_285M.yaml"


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("fields", "named", "config"),
    [
        ({}, r"2.jpg'", RETINANET),  # whose file is cut
        ({"category_id": 3}, "annotation id 2", RETINANET),
        ({"segmentation": None}, r"id 1.*MASK_ON", MASK_RCNN),
    ],
)
def test_bad_data_are_named_before_anything_is_written(
    tmp_path, tiny_data, fields, named, config, split
):
    for name in ("train", "val"):
        shutil.copytree(tiny_data, tmp_path / name)
    path, image = (tmp_path / split / part for part in ("annotations.json", "images/000002.jpg"))
    content = json.loads(path.read_text())
    content["annotations"][1].update(fields)
    path.write_text(json.dumps(content))
    if not fields:
        image.write_bytes(image.read_bytes()[:500])
    flags = ["--strict", "--data", "train/annotations.json", "--val", "val/annotations.json"]
    opts = {"OUTPUT_DIR": "output", "INPUT.MASK_FORMAT": "bitmask"}
    with pytest.raises(UserError, match=named) as error:
        build_config(parse_run(get_config_path(config), opts, *flags))
    assert f"{split}/" in str(error.value)
    assert not Path("output").exists()

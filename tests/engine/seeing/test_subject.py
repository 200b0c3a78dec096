# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs and weights as things to look at: found, named, and read only when wanted."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog
from PIL import Image

from qbheat_det.core.errors import UserError
from qbheat_det.engine.seeing.refusal import NothingToSee
from qbheat_det.engine.seeing.subject import Subject, open_subjects

from ..conftest import forget_runs
from ..tiny_detectors import make_probe_config, make_retinanet_config, save_run
from .encoder_subjects import make_pictures, pretraining_config

CATEGORIES = [{"id": 4, "name": "square"}, {"id": 9, "name": "disc"}]


def write_coco(folder: Path) -> tuple[str, str]:
    """Writes three images of 40 x 30 and their annotations; returns file and folder."""
    (folder / "images").mkdir(parents=True)
    for index in range(3):
        Image.new("RGB", (40, 30), (80 * index, 0, 0)).save(folder / "images" / f"{index}.png")
    images = [{"id": i, "file_name": f"{i}.png", "width": 40, "height": 30} for i in range(3)]
    boxes = [{"id": 1, "image_id": 0, "category_id": 9, "bbox": [2, 3, 20, 10], "area": 200,
              "iscrowd": 0}]  # fmt: skip
    content = {"images": images, "annotations": boxes, "categories": CATEGORIES}
    (folder / "val.json").write_text(json.dumps(content))
    return str(folder / "val.json"), str(folder / "images")


def write_record(folder: Path, *flags: str) -> None:
    starts = [{"command": ["old"]}, {"command": ["train_net.py", *flags, "SEED", "1"]}]
    (folder / "run.json").write_text(json.dumps(starts))


def test_a_run_is_its_folder_and_its_model_holds_the_final_weights(tmp_path: Path) -> None:
    weights = save_run(make_retinanet_config(), tmp_path / "mine", seed=3)
    (tmp_path / "mine" / "metrics.json").write_text('{"iteration": 9, "lr": 0.1}\n{"itera')
    subject = Subject.open(tmp_path / "mine", device="cpu")
    assert (subject.label, subject.folder) == ("mine", tmp_path / "mine")
    assert (subject.kind, str(subject.weights)) == ("detector", weights)
    assert subject.metrics == [{"iteration": 9, "lr": 0.1}]
    assert subject.cfg.OUTPUT_DIR == str(tmp_path / "mine")
    stored = torch.load(weights, weights_only=True)["model"]
    torch.testing.assert_close(dict(subject.model.state_dict()), stored, rtol=0, atol=0)
    assert subject.model is subject.model
    assert not subject.model.training
    assert not any(parameter.requires_grad for parameter in subject.model.parameters())


def test_weights_alone_have_no_log_and_take_the_config_beside_them(tmp_path: Path) -> None:
    weights = save_run(pretraining_config(), tmp_path / "run")
    (tmp_path / "run" / "metrics.json").write_text('{"iteration": 9}\n')
    subject = Subject.open(weights, device="cpu", opts=["SEED", "5"])
    assert (subject.label, subject.folder, subject.metrics) == ("run/model_final", None, [])
    assert (subject.kind, subject.cfg.SEED) == ("pretraining", 5)
    # Of a pre-trained model all that it was trained with, not the encoder alone.
    assert {"backbone", "predictor", "decoder"} <= {
        name for name, _ in subject.model.named_children()
    }


def test_a_run_that_is_still_going_gives_its_last_checkpoint_and_then_none(tmp_path: Path) -> None:
    weights = Path(save_run(make_probe_config(), tmp_path / "run"))
    weights.rename(tmp_path / "run" / "model_0000009.pth")
    (tmp_path / "run" / "last_checkpoint").write_text("model_0000009.pth")
    assert Subject.open(tmp_path / "run").weights.name == "model_0000009.pth"
    (tmp_path / "run" / "model_0000009.pth").unlink()
    young = Subject.open(tmp_path / "run", device="cpu")
    assert young.kind == "detector"
    with pytest.raises(NothingToSee, match="'run' has no checkpoint yet"):
        _ = young.model


def test_what_is_no_run_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Subject.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is no folder of a run"):
        Subject.open(tmp_path)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps({}))
    with pytest.raises(UserError, match=r"neither .* weights .*, nor figures of probes \(\.json\)"):
        Subject.open(tmp_path / "model.pkl")


def test_no_pickle_is_run(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (tmp_path / "ran",)

    save_run(make_probe_config(), tmp_path / "run")
    (tmp_path / "run" / "model_final.pth").write_bytes(pickle.dumps({"model": Harmful()}))
    with pytest.raises(UserError):
        _ = Subject.open(tmp_path / "run", device="cpu").model
    assert not (tmp_path / "ran").exists()


def test_labels_are_short_until_two_are_alike(tmp_path: Path) -> None:
    paths = []
    for name in ("a/seed1/pretraining", "b/seed1/pretraining", "c/other"):
        save_run(make_probe_config(), tmp_path / name)
        paths.append(str(tmp_path / name))
    subjects = open_subjects([*paths, f"Ours={paths[0]}"])
    labels = [subject.label for subject in subjects]
    assert labels == ["a/seed1/pretraining", "b/seed1/pretraining", "other", "Ours"]
    assert subjects[3].folder == tmp_path / "a/seed1/pretraining"
    with pytest.raises(UserError, match="two runs are called 'x': give them labels"):
        open_subjects([f"x={paths[0]}", f"x={paths[1]}"])
    with pytest.raises(UserError, match="two runs are called"):
        open_subjects([paths[2], paths[2]])
    files = []
    for name in ("x/seed1", "y/seed1"):  # figures of probes are told apart as weights are
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "probes.json").touch()
        files += [str(tmp_path / name / "probes.json"), str(tmp_path / name)]
    labels = [subject.label for subject in open_subjects(files)]
    assert labels == ["x/seed1/probes", "x/seed1", "y/seed1/probes", "y/seed1"]
    (tmp_path / "b/seed1/pretraining/probes.json").touch()
    run = Subject.open(paths[1])
    assert (run.figures, run.has_figures_alone) == (Path(paths[1]) / "probes.json", False)
    assert Subject.open(files[1]).has_figures_alone


def test_pictures_come_from_a_folder_spread_evenly_and_broken_ones_are_replaced(
    tmp_path: Path,
) -> None:
    save_run(pretraining_config(), tmp_path / "run")
    subject = Subject.open(tmp_path / "run", device="cpu")
    (tmp_path / "photos").mkdir()
    photos = make_pictures(tmp_path / "photos", 8)
    entries = subject.load_entries(4, photos)
    assert [Path(entry["file_name"]).name for entry in entries] == [
        "0.png", "2.png", "4.png", "6.png"
    ]  # fmt: skip
    assert all(entry["image"].shape == (3, 64, 64) for entry in entries)
    (photos / "2.png").write_text("not a picture")
    names = [Path(entry["file_name"]).name for entry in subject.load_entries(4, photos)]
    assert names == ["0.png", "3.png", "4.png", "6.png"]
    assert len(subject.load_entries(99, photos)) == 7


def test_sets_that_flags_made_are_found_again_in_the_record_of_the_run(tmp_path: Path) -> None:
    cfg = make_probe_config()
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("custom_train",), ("custom_val",)
    own = {}
    for name in ("one", "two"):
        json_file, images = write_coco(tmp_path / name / "data")
        save_run(cfg, tmp_path / name)
        write_record(tmp_path / name, "--val-json", json_file, "--val-images", images)
        subject = Subject.open(tmp_path / name, device="cpu")
        own[name] = subject.find_set("test")
        entries = subject.load_entries(2)
        assert [entry["file_name"] for entry in entries] == [f"{images}/0.png", f"{images}/1.png"]
        assert (entries[0]["height"], entries[0]["width"]) == (30, 40)
        with pytest.raises(NothingToSee, match=r"run\.json does not tell what the train set was"):
            subject.find_set("train")
    assert own["one"] != own["two"]  # two runs that are compared keep their own data
    forget_runs(*own.values())


def test_data_that_are_gone_are_said_to_be(tmp_path: Path) -> None:
    cfg = make_probe_config()
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("custom_train",), ("never_registered",)
    save_run(cfg, tmp_path / "run")
    subject = Subject.open(tmp_path / "run", device="cpu")
    with pytest.raises(NothingToSee, match=r"named by flags, and there is no run\.json"):
        subject.find_set("train")
    write_record(tmp_path / "run", "--train-json", "gone.json", "--train-images", "gone")
    with pytest.raises(NothingToSee, match="the train set cannot be read here"):
        subject.find_set("train")
    with pytest.raises(NothingToSee, match=r"'never_registered' is not registered.*with --images"):
        subject.load_entries(1)
    assert "never_registered" not in DatasetCatalog

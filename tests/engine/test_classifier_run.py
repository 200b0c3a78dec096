# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Classifiers from class folders: probed, fine-tuned, resumed, evaluated in a run and alone."""

import json
from pathlib import Path

import pytest
import torch

from qbheat_det.checkpoint import class_names_of
from qbheat_det.config import get_config_path
from qbheat_det.engine import Trainer, evaluate

from .classifier_cases import configure, make_classes, train
from .tiny_pretraining import OPTS as PRETRAINING_OPTS
from .tiny_training import losses, parse_run, read_opts, start_run, state

VAL = "custom_labelled_val"
PROBE, FINETUNE = "ImageNet-probing/tran1_3.7G.yaml", "ImageNet-finetune/tran1_3.7G.yaml"
OPTS = {
    **PRETRAINING_OPTS,
    **read_opts("""
MODEL.CLASSIFIER.WIDTH 64 INPUT.PRETRAIN.SIZE 32 DATALOADER.NUM_WORKERS 0 SOLVER.IMS_PER_BATCH 8
SOLVER.BASE_LR 0.05
"""),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_classes(tmp_path_factory.mktemp("classes"), {"blue": 4, "green": 4, "red": 4})


def start(output_dir, recipe, folder, opts, *flags):
    """Returns the trainer before its first step."""
    pairs = {**OPTS, **opts, "OUTPUT_DIR": str(output_dir)}
    args = parse_run(get_config_path(recipe), pairs, "--data", folder, *flags)
    return start_run(args)


def copy_state(trainer):
    return {key: tensor.clone() for key, tensor in trainer.bare_model.state_dict().items()}


def test_a_probed_encoder_stays_and_fine_tuning_starts_from_it_and_resumes(folder, tmp_path):
    drop_path = {"MODEL.MOBILE_FORMER.DROP_PATH": "0.5"}  # off, where the encoder is frozen
    probe = start(tmp_path / "probe", PROBE, folder, drop_path)
    before = copy_state(probe)
    probe.train()
    after = copy_state(probe)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == name.startswith("backbone."), name
    assert '"accuracy"' in (tmp_path / "probe" / "metrics.json").read_text()

    run = tmp_path / "tuned"
    opts = {
        "MODEL.WEIGHTS": str(tmp_path / "probe" / "model_final.safetensors"),
        "MODEL.MOBILE_FORMER.DROP_PATH": "0.2",  # besides mixing, dropout and augmentation
    }
    tuned = start(run, FINETUNE, folder, opts)
    loaded = copy_state(tuned)
    shared = {name: loaded[name] for name in after}  # frozen norms count no batches
    torch.testing.assert_close(shared, after, rtol=0, atol=0)
    tuned.train()
    whole, expected = state(run)["model"], losses(run)
    moved = [name for name, p in tuned.bare_model.named_parameters() if (p != loaded[name]).any()]
    assert "backbone.stem.weight" in moved
    (run / "model_final.pth").unlink()
    (run / "last_checkpoint").write_text("model_0000001.pth")
    start(run, FINETUNE, folder, opts, "--resume").train()
    assert losses(run) == expected
    torch.testing.assert_close(state(run)["model"], whole, rtol=0, atol=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Four classes, of which the second folder has three, one image of it broken."""
    root = tmp_path_factory.mktemp("classes")
    train_folder = make_classes(root / "train", {"ape": 3, "bee": 4, "cat": 3, "dog": 2})
    val_folder = make_classes(root / "val", {"bee": 3, "cat": 2, "dog": 2}, first=200)
    (root / "val" / "dog" / "x.jpg").write_text("no image")
    return train_folder, val_folder


def flags_of(folders):
    return ["--data", folders[0], "--val", folders[1]]


def labels_of(entries):
    return {(Path(entry["file_name"]).parts[-2], entry["label"]) for entry in entries}


def test_classes_come_from_the_training_folder_and_labels_from_their_names(folders):
    cfg, _ = configure({}, *flags_of(folders))
    assert cfg.MODEL.CLASS_NAMES == ["ape", "bee", "cat", "dog"]
    assert cfg.MODEL.CLASSIFIER.NUM_CLASSES == 4
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("custom_labelled_train",), (VAL,))
    assert Trainer.build_train_loader(cfg).num_images == 12
    entries = [entry for batch in Trainer.build_test_loader(cfg, VAL) for entry in batch]
    assert labels_of(entries) == {("bee", 1), ("cat", 2), ("dog", 3)}
    assert len(entries) == 7


def test_a_run_trains_evaluates_and_is_evaluated_alone(folders, tmp_path):
    whole = tmp_path / "whole"
    trainer = train(whole, {"TEST.EVAL_PERIOD": "2"}, *flags_of(folders))
    found = trainer._last_eval_results["classification"]
    assert 0 <= found["top1"] <= found["top5"] == 100  # there are but four classes
    written = json.loads((whole / "inference" / VAL / "classification.json").read_text())
    assert written["num_images"] == 7
    assert (whole / "model_best.safetensors").is_file()
    assert "x.jpg" in (whole / "log.txt").read_text()
    weights = str(whole / "model_final.safetensors")
    assert class_names_of(weights) == ("ape", "bee", "cat", "dog")

    # The weights know more classes than the folder has.
    cfg, _ = configure({"MODEL.WEIGHTS": weights}, "--eval-only", "--val", folders[1])
    assert cfg.MODEL.CLASSIFIER.NUM_CLASSES == 4
    assert evaluate(cfg) == {"classification": pytest.approx(found)}
    cfg, _ = configure({"OUTPUT_DIR": str(whole)}, "--eval-only", "--resume", "--val", folders[1])
    assert evaluate(cfg, resume=True) == {"classification": pytest.approx(found)}

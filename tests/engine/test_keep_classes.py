# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Adding classes to a detector by ``--keep-classes``: a run of seconds, and what is refused."""

import json
import shutil

import pytest
import torch

from qbheat_det.checkpoint import WeightsInfo, info_of, read_weights, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.engine import Trainer
from qbheat_det.engine.batch_size import try_batches
from qbheat_det.engine.dry_run import dry_run
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES
from tests.toy_set import draw_toy_set

from .test_resume import assert_same_bits, break_at, comparable
from .tiny_training import (
    CONFIG,
    MF_DETR,
    TINY,
    assemble,
    build_config,
    losses,
    parse_run,
    read_opts,
    start_run,
    state,
)

OLD = ("shape 4", "shape 1")
NEW = ("shape 2", "shape 1")  # one class of both
KEPT = read_opts("MODEL.KEEP_CLASSES.MIN_SCORE 0.005 TEST.EVAL_PERIOD 4")
FROZEN = read_opts("""
MODEL.BACKBONE.FREEZE_AT 5 INPUT.FIXED_VIEWS.COUNT 2 MODEL.CACHE_FEATURES.ENABLED True
MODEL.CACHE_FEATURES.DTYPE float32
""")
SELECTED = read_opts("""
MODEL.MF_DETR.CLASSIFICATION focal MODEL.MF_DETR.QUERY_SELECTION.ENABLED True
""")


def write_part(folder, names, *, seed):
    """Writes images with the boxes of some classes alone, in this order of classes."""
    drawn = draw_toy_set(folder, 8, name="_".join(names).replace(" ", ""), seed=seed)
    content = json.loads((drawn / "annotations.json").read_text())
    ids = {entry["name"]: entry["id"] for entry in content["categories"]}
    content["categories"] = [
        {"id": number, "name": name} for number, name in enumerate(names, start=1)
    ]
    new_ids = {ids[name]: number for number, name in enumerate(names, start=1)}
    content["annotations"] = [
        {**box, "category_id": new_ids[box["category_id"]]}
        for box in content["annotations"]
        if box["category_id"] in new_ids
    ]
    (drawn / "annotations.json").write_text(json.dumps(content))
    return drawn


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    return {
        "old": write_part(folder, OLD, seed=5),
        "new": write_part(folder, NEW, seed=6),
        "other": write_part(folder, ("shape 9",), seed=7),
    }


def parse(parts, names, output, opts, *flags):
    """Returns the arguments of a tiny run on some of the parts, evaluated on the same."""
    paths = []
    for name in names:
        for flag in ("--data", "--val"):
            paths += [flag, str(parts[name] / "annotations.json")]
        for flag in ("--images", "--val-images"):
            paths += [flag, str(parts[name] / "images")]
    return parse_run(CONFIG, {**TINY, **opts, "OUTPUT_DIR": str(output)}, *flags, *paths)


@pytest.fixture(scope="module")
def run(parts, tmp_path_factory):
    """The folder of a detector of the old classes."""
    folder = tmp_path_factory.mktemp("old") / "run"
    start_run(parse(parts, ["old"], folder, {})).train()
    return folder


def keep(parts, run, output, opts, *flags, names=("new",)):
    weights = str(run / "model_final.safetensors")
    flags = ("--weights", weights, "--keep-classes", *flags)
    return parse(parts, names, output, {**KEPT, **opts}, *flags)


def read_metrics(folder):
    lines = map(json.loads, (folder / "metrics.json").read_text().splitlines())
    return {line["iteration"]: line for line in lines if "total_loss" in line}


@pytest.mark.parametrize("names", [["new"], ["new", "old"]])
def test_old_classes_come_first_with_their_rows_and_images_know_what_is_annotated(
    names, parts, run, tmp_path
):
    trainer = start_run(keep(parts, run, tmp_path / "grown", {}, names=names))
    assert trainer.cfg.MODEL.CLASS_NAMES == ["shape 4", "shape 1", "shape 2"]
    assert trainer.cfg.MODEL.KEEP_CLASSES.NUM == 2
    old, _ = read_weights(str(run / "model_final.safetensors"))
    now = trainer.bare_model.state_dict()
    for part in ("weight", "bias"):
        rows = now[f"head.cls_score.{part}"].unflatten(0, (-1, 3))[:, :2]
        expected = old[f"head.cls_score.{part}"].unflatten(0, (-1, 2))
        assert torch.equal(rows, expected)
    batch = next(iter(trainer.data_loader))
    annotated = {tuple(sorted(entry[ANNOTATED_CLASSES])) for entry in batch}
    assert annotated <= {(1, 2), (0, 1)}
    assert (1, 2) in annotated or names != ["new"]
    assert (tmp_path / "grown" / "log.txt").read_text().count("Loaded '") == 1
    trainer.train()
    metrics = read_metrics(tmp_path / "grown")
    assert {"loss_kept_cls", "loss_kept_box", "loss_kept_features"} <= metrics[0].keys()
    final = str(tmp_path / "grown" / "model_final.safetensors")
    assert info_of(final).class_names == ("shape 4", "shape 1", "shape 2")


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_broken_run_ends_with_the_bits_of_an_unbroken_one(
    is_cached, parts, run, tmp_path, monkeypatch
):
    opts = {**FROZEN} if is_cached else {"SOLVER.ACCUMULATE": "2", "SOLVER.EMA.ENABLED": "True"}
    opts["MODEL.CACHE_FEATURES.FOLDER"] = str(tmp_path / "cache")
    start_run(keep(parts, run, tmp_path / "whole", opts)).train()
    break_at(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        start_run(keep(parts, run, tmp_path / "broken", opts)).train()
    start_run(keep(parts, run, tmp_path / "broken", opts, "--resume")).train()
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert_same_bits(comparable(state(tmp_path / "broken")), comparable(state(tmp_path / "whole")))
    metrics = read_metrics(tmp_path / "whole")
    assert all(line["loss_kept_cls"] > 0 for index, line in metrics.items() if index > 1)
    assert ("loss_kept_features" in metrics[4]) != is_cached


def test_mf_detr_keeps_classes_too(parts, tmp_path):
    opts = {**MF_DETR, **SELECTED, "SOLVER.ACCUMULATE": "2"}
    start_run(parse(parts, ["old"], tmp_path / "old", opts)).train()
    trainer = start_run(keep(parts, tmp_path / "old", tmp_path / "grown", opts))
    trainer.train()
    assert trainer.cfg.MODEL.CLASS_NAMES == ["shape 4", "shape 1", "shape 2"]
    assert read_metrics(tmp_path / "grown")[4]["loss_kept_features"] > 0


def test_weights_that_change_before_a_resume_are_refused(parts, run, tmp_path, monkeypatch):
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    break_at(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        start_run(keep(parts, copied, tmp_path / "broken", {})).train()
    weights = str(copied / "model_final.safetensors")
    tensors, info = read_weights(weights)
    save_weights(weights, {name: 2 * value for name, value in tensors.items()}, info)
    with pytest.raises(UserError, match="has changed since"):
        start_run(keep(parts, copied, tmp_path / "broken", {}, "--resume"))


def test_results_of_old_and_new_classes_are_apart_and_a_grown_detector_can_be_a_start(
    parts, run, tmp_path
):
    grown = tmp_path / "grown"
    results = start_run(keep(parts, run, grown, {}, names=["new", "old"])).train()["bbox"]
    old = [results["AP-shape 4"], results["AP-shape 1"]]
    assert results["AP_old"] == pytest.approx(sum(old) / 2)
    assert results["AP_new"] == pytest.approx(results["AP-shape 2"])
    again = keep(parts, grown, tmp_path / "again", {}, names=["other"])
    assert build_config(again).MODEL.KEEP_CLASSES.NUM == 3
    weights = str(grown / "model_final.safetensors")
    without = parse(parts, ["other"], tmp_path / "without", {}, "--weights", weights)
    assert build_config(without).MODEL.KEEP_CLASSES.NUM == 0


def test_a_dry_run_and_trials_of_the_batch_make_steps(parts, run, tmp_path, caplog):
    stage = assemble(keep(parts, run, tmp_path / "dry", {}))
    report = dry_run(stage.cfg, Trainer)
    assert "predicted nothing" not in caplog.text
    assert report.total_seconds > 0
    assert not (tmp_path / "dry").exists()
    stage.data.register()
    images = next(iter(Trainer.build_train_loader(stage.cfg)))
    (trial,) = try_batches(stage.cfg, images, 2, 2)
    assert trial.fits


def test_without_the_flag_the_log_names_it(parts, run, tmp_path):
    flags = ("--weights", str(run / "model_final.safetensors"))
    for name, is_named in (("new", True), ("old", False)):
        start_run(parse(parts, [name], tmp_path / name, {}, *flags))
        log = (tmp_path / name / "log.txt").read_text()
        assert ("--keep-classes" in log) == is_named


def test_a_class_in_another_spelling_than_a_kept_one_is_named(parts, run, tmp_path):
    new = tmp_path / "new"
    shutil.copytree(parts["new"], new)
    text = (new / "annotations.json").read_text()
    (new / "annotations.json").write_text(text.replace("shape 1", " Shape 1"))
    stage = assemble(keep({"new": new}, run, tmp_path / "grown", {}))
    assert stage.cfg.MODEL.CLASS_NAMES == ["shape 4", "shape 1", "shape 2", " Shape 1"]
    notes = [note for account in stage.data.given[0].accounts.values() for note in account.notes]
    assert any("different classes: 'shape 1', ' Shape 1'" in note for note in notes)


def test_what_cannot_be_kept_is_refused(parts, run, tmp_path):
    weights = str(run / "model_final.safetensors")
    tensors, info = read_weights(weights)
    encoder = str(tmp_path / "encoder.safetensors")
    save_weights(encoder, tensors, WeightsInfo())
    architecture = {"MODEL.META_ARCHITECTURE": "SyncFCOS"}
    plain = {"MODEL.META_ARCHITECTURE": "RetinaNet"}
    backbone = {"MODEL.FPN.BOTTOM_UP": "timm:resnet18"}
    of_detectron2 = str(tmp_path / "plain.safetensors")
    text = info.config.replace("SyncRetinaNet", "RetinaNet")
    save_weights(of_detectron2, tensors, WeightsInfo(class_names=OLD, config=text))
    cases = [
        ({}, ["new"], [], "--weights"),
        ({}, ["new"], ["--weights", encoder], "names no classes"),
        (architecture, ["new"], ["--weights", weights], "SyncRetinaNet.*SyncFCOS"),
        (backbone, ["new"], ["--weights", weights], "BOTTOM_UP MobileFormer.*timm:resnet18"),
        (plain, ["new"], ["--weights", of_detectron2], "RetinaNet cannot keep"),
        ({}, ["old"], ["--weights", weights], "no new one"),
        ({"MODEL.KEEP_CLASSES.NUM": "1"}, ["new"], ["--weights", weights], "KEEP_CLASSES.NUM"),
        ({"MODEL.KEEP_CLASSES.MIN_SCORE": "3.0"}, ["new"], ["--weights", weights], "MIN_SCORE"),
        ({"MODEL.KEEP_CLASSES.WEIGHT": "-1.0"}, ["new"], ["--weights", weights], "CLASSES.WEIGHT"),
    ]
    for opts, names, flags, named in cases:
        args = parse(parts, names, tmp_path / "out", opts, *flags, "--keep-classes")
        with pytest.raises(UserError, match=named):
            build_config(args)

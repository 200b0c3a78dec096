# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A run of two stages equals two commands, and resumes in the stage in which it stopped."""

import dataclasses
import re
import time
from dataclasses import replace

import pytest

from qbheat_det.api import training
from qbheat_det.checkpoint import find_weights, join_detectors
from qbheat_det.config import get_config_path, get_value, load_config, with_values
from qbheat_det.core.errors import UserError
from qbheat_det.engine import (
    RunFlags,
    Stage,
    Trainer,
    assemble_evaluation,
    assemble_run,
    read_config,
)
from qbheat_det.engine.run_config import read_first_stage
from qbheat_det.engine.time_limit import TimeLimit
from qbheat_det.tasks import DETECTION

from .test_resume import assert_same_bits
from .tiny_training import TINY_ENCODER, read_opts, run_tool, state, words_of

CONFIG = "quick_schedules/retinanet_small_cells.yaml"
FIRST = """
_BASE_: "{base}"
MODEL:
  BACKBONE: {{FREEZE_AT: 5}}
  CACHE_FEATURES: {{ENABLED: True, FOLDER: "{folder}"}}
INPUT:
  MIN_SIZE_TRAIN: (32,)
  FIXED_VIEWS: {{COUNT: 1}}
SOLVER: {{EPOCHS: 0.0, MAX_ITER: 2, IMS_PER_BATCH: 2, CHECKPOINT_EPOCHS: 0.0}}
"""
SHARED = {
    **TINY_ENCODER,
    **read_opts("MODEL.FPN.OUT_CHANNELS 16 SEED 3 DATALOADER.NUM_WORKERS 0 MODEL.DEVICE cpu"),
}
OPTS = read_opts("""
SOLVER.EPOCHS 0 SOLVER.CHECKPOINT_EPOCHS 0 SOLVER.MAX_ITER 3 SOLVER.IMS_PER_BATCH 2
INPUT.MIN_SIZE_TRAIN (64,) INPUT.MIN_SIZE_TEST 64 TEST.EVAL_PERIOD 0
""")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The config of the first stage."""
    folder = tmp_path_factory.mktemp("config")
    path = folder / "first.yaml"
    path.write_text(FIRST.format(base=get_config_path(CONFIG), folder=folder / "cache"))
    return path


@pytest.fixture(scope="module")
def second(first):
    """The config of the second stage, which names the first one by a relative path."""
    path = first.with_name("second.yaml")
    path.write_text(f'_BASE_: "{get_config_path(CONFIG)}"\nSOLVER: {{FIRST_STAGE: first.yaml}}\n')
    return path


@pytest.fixture(scope="module")
def data(few_data):
    return str(few_data / "annotations.json")


def train(config, data, output, opts, *flags):
    """Runs ``tools/train_net.py`` in this process."""
    words = ["--config-file", str(config), "--data", data, "--val", data, "--output", str(output)]
    run_tool([*words, *flags, *words_of(opts)])


def assert_same_weights(folder, other):
    assert_same_bits(state(folder)["model"], state(other)["model"])


def test_two_stages_equal_two_commands_and_resume_exactly(
    first, second, data, tmp_path, monkeypatch
):
    reports = []  # without figures, which take most of the time
    monkeypatch.setattr(training, "build_report", lambda *_, lead, **__: reports.append(lead) or [])
    weights = tmp_path / "by_hand" / "model_final.safetensors"
    train(first, data, weights.parent, SHARED)
    both, output = {**SHARED, **OPTS}, tmp_path / "staged"
    train(get_config_path(CONFIG), data, tmp_path / "two", both, "--weights", str(weights))
    train(second, data, output, both)
    assert_same_weights(output / "first_stage", weights.parent)
    assert_same_weights(output, tmp_path / "two")

    # Stopped between the stages: the first one is not trained again.
    done = (output / "first_stage" / "model_final.pth").stat().st_mtime_ns
    for path in [*output.glob("model_*"), output / "last_checkpoint"]:
        path.unlink()
    train(second, data, output, both, "--resume")
    assert (output / "first_stage" / "model_final.pth").stat().st_mtime_ns == done
    assert_same_weights(output, tmp_path / "two")

    # The report names the start and the time of both stages, also if nothing was left to do.
    train(second, data, output, both, "--resume")
    for lead in reports[-2:]:
        assert re.search(r"3 steps of 2 images in .*, starting from .*first_stage/model_best", lead)
        assert "best evaluation, model_best.safetensors, after 3 steps" in lead


def test_a_head_on_the_frozen_encoder_of_a_detector_can_be_joined_with_it(
    second, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, "build_report", lambda *_, **__: [])
    run, head = tmp_path / "run", tmp_path / "head"
    train(second, data, run, {**SHARED, **OPTS, "INPUT.MIN_SIZE_TEST": "48"})
    words = ["--data", data, "--val", data, "--weights", str(run), "--freeze"]
    run_tool([*words, "--output", str(head), *words_of(SHARED)])
    cfg = load_config(head / "config.yaml")
    assert (cfg.INPUT.MIN_SIZE_TEST, tuple(cfg.INPUT.MIN_SIZE_TRAIN)) == (48, (64,))
    assert cfg.MODEL.CACHE_FEATURES.ENABLED
    # Encoders and sizes fit, and it is only the classes that do not.
    with pytest.raises(UserError, match="find all classes"):
        join_detectors([str(run), str(head)], tmp_path / "joined.safetensors")


@pytest.mark.parametrize("second_value", [10.0, 60.0])
def test_a_second_stage_that_is_worse_leaves_the_weights_of_the_first(
    second_value, second, data, tmp_path, monkeypatch
):
    leads = []
    monkeypatch.setattr(training, "build_report", lambda *_, lead, **__: leads.append(lead) or [])

    def evaluate(trainer):
        is_first = trainer.cfg.OUTPUT_DIR.endswith("first_stage")
        return {"bbox": {"AP": 50.0 if is_first else second_value}}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    output = tmp_path / "run"
    opts = {**SHARED, **OPTS}
    for flags in ([], ["--resume"]):
        train(second, data, output, opts, *flags)
        first = (output / "first_stage" / "model_best.safetensors").read_bytes()
        is_kept = (output / "model_best.safetensors").read_bytes() == first
        assert is_kept == (second_value < 50)
        assert ("weights of the first stage" in leads[-1]) == is_kept
        log = (output / "log.txt").read_text()
        assert ("bbox/AP 10 instead of 50" in log) == is_kept


def test_the_first_stage_shares_data_device_and_model(first, data):
    opts = {**SHARED, **OPTS, "SOLVER.FIRST_STAGE": str(first)}
    flags = RunFlags(
        config_file=get_config_path(CONFIG),
        data=data,
        val=data,
        tile=64,
        output="o",
        opts=words_of(opts),
    )
    stage, last = assemble_run(flags)
    assert str(stage.folder) == "o/first_stage"
    assert stage.data.train == last.data.train
    expected = load_config(first, [*words_of(SHARED), "INPUT.TILE", "64"])
    for key in (*SHARED, "INPUT.TILE", "SOLVER.MAX_ITER", "INPUT.MIN_SIZE_TRAIN"):
        assert get_value(stage.cfg, key) == get_value(expected, key), key
    assert last.cfg.SOLVER.MAX_ITER == 3


def test_overrides_that_neither_stage_reads_are_named_in_the_log(first, data, tmp_path):
    opts = {**SHARED, **OPTS, "SOLVER.FIRST_STAGE": str(first)}
    opts["MODEL.MF_DETR.NUM_OBJECT_QUERIES"] = "7"
    flags = RunFlags(config_file=get_config_path(CONFIG), data=data, val=data, opts=words_of(opts))
    line = "Overrides without effect on SyncRetinaNet: MODEL.MF_DETR.NUM_OBJECT_QUERIES"
    for stages in (
        assemble_run(replace(flags, output=str(tmp_path / "run"))),
        [assemble_evaluation(replace(flags, eval_only=True, output=str(tmp_path / "test")))],
    ):
        assert line in stages[0].title.splitlines()
        assert all(line not in stage.title for stage in stages[1:])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("nowhere.yaml", "nowhere"),
        ("custom/retinanet_lite0_finetune.yaml", "itself"),
        ("custom/distill_285M_cpu.yaml", "images"),
        ("custom/cached_mf_detr_211_lite0_probe.yaml", "MODEL.META_ARCHITECTURE"),
        ("custom/cached_retinanet_285M_probe.yaml", "MODEL"),
    ],
)
def test_an_unsuitable_first_stage_is_refused(data, config, named):
    flags = RunFlags(
        config_file="custom/retinanet_lite0_finetune.yaml",
        data=data,
        opts=["SOLVER.FIRST_STAGE", config],
    )
    with pytest.raises(UserError, match=r"SOLVER\.FIRST_STAGE") as error:
        read_first_stage(read_config(flags), flags.overrides)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "qbheat://retinanet/285M_bccd"},
        {"opts": ["MODEL.WEIGHTS", ""]},
        {"freeze": True},
    ],
)
def test_trained_heads_and_frozen_backbones_need_no_first_stage(data, change):
    flags = RunFlags(config_file="custom/retinanet_285M_finetune.yaml", data=data)
    assert read_first_stage(read_config(flags), flags.overrides) is not None
    flags = dataclasses.replace(flags, **change)
    assert read_first_stage(read_config(flags), flags.overrides) is None


def test_freeze_trains_the_first_stage_alone_on_cached_features(data):
    flags = RunFlags(data=data, val=data, freeze=True, epochs=3, opts=["TEST.EVAL_EPOCHS", "1"])
    (stage,) = assemble_run(flags)
    first = load_config(load_config(DETECTION.recipe).SOLVER.FIRST_STAGE)
    assert stage.cfg.MODEL.CACHE_FEATURES.ENABLED
    assert stage.cfg.INPUT == first.INPUT
    assert stage.cfg.MODEL.WEIGHTS == first.MODEL.WEIGHTS
    assert (stage.cfg.SOLVER.EPOCHS, stage.cfg.TEST.EVAL_EPOCHS) == (3, 1)
    assert "cached" in stage.title

    (plain,) = assemble_run(replace(flags, config_file="custom/retinanet_285M_scratch.yaml"))
    assert not plain.cfg.MODEL.CACHE_FEATURES.ENABLED
    assert "SOLVER.FIRST_STAGE" in plain.title


def test_without_time_the_run_is_its_first_stage(tmp_path, monkeypatch):
    cfg = load_config(CONFIG)
    last = Stage(with_values(cfg, {"OUTPUT_DIR": str(tmp_path / "run")}), None)
    first = last.with_values({"OUTPUT_DIR": str(last.folder / "first_stage")})

    def leave_files(stage):
        (stage.folder / "inference_best").mkdir(parents=True)
        for name in ("model_best.safetensors", "model_final.safetensors", "report.html"):
            (stage.folder / name).write_text(str(stage.folder))
        return {"AP": 1.0}

    monkeypatch.setattr(training, "train_stage", leave_files)
    limit = TimeLimit(end=time.monotonic() + 60, needed=61)
    assert training.train_run([first, replace(last, limit=limit)]) == {"AP": 1.0}
    assert find_weights(last.folder) == str(last.folder / "model_best.safetensors")
    assert (last.folder / "report.html").read_text() == str(first.folder)
    assert (last.folder / "inference_best").is_dir()


@pytest.mark.parametrize("as_flag", [True, False])
def test_both_stages_start_from_a_named_encoder(data, as_flag, monkeypatch):
    encoder = "qbheat://qb_heat/285M_caltech101"
    given = {"weights": encoder} if as_flag else {"opts": ["MODEL.WEIGHTS", encoder]}
    flags = RunFlags(
        config_file="custom/retinanet_285M_finetune.yaml", data=data, val=data, **given
    )
    first, second = assemble_run(flags)
    assert first.cfg.MODEL.WEIGHTS == second.cfg.MODEL.WEIGHTS == encoder
    started = []
    monkeypatch.setattr(training, "train_stage", lambda stage: started.append(stage) or {})
    training.train_run([first, second])
    weights = [stage.cfg.MODEL.WEIGHTS for stage in started]
    assert weights == [encoder, f"{first.folder}/model_final.safetensors"]

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Recipes for a GPU: which one is chosen, and images per step that fit a memory, on the CPU."""

import dataclasses
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from detectron2.utils import comm

from qbheat_det.api import training
from qbheat_det.config import dump_config, load_config
from qbheat_det.core.environment import count_cores
from qbheat_det.core.errors import UserError
from qbheat_det.engine import RunFlags, Trainer, assemble_run, batch_size
from qbheat_det.engine.batch_size import (
    Trial,
    draw_largest_images,
    find_canvas,
    find_largest,
    limit_batch,
    run_trials,
    try_batches,
)
from qbheat_det.engine.run_config import choose_recipe
from qbheat_det.tasks import find_task
from tests.engine.tiny_training import build_config, parse, run_tool

SIZES = ("s", "m", "l")
FAST = [
    *("INPUT.MIN_SIZE_TRAIN", "(48,64)", "INPUT.MAX_SIZE_TRAIN", "96"),
    *("INPUT.MIN_SIZE_TEST", "64", "DATALOADER.NUM_WORKERS", "0", "DATASETS.VAL_FRACTION", "0"),
]


@pytest.fixture
def flags(few_data, tmp_path):
    return RunFlags(
        data=str(few_data / "annotations.json"),
        images=str(few_data / "images"),
        output=str(tmp_path / "run"),
        size="s",
        opts=["MODEL.WEIGHTS", "", *FAST],
    )


@pytest.fixture
def on_gpu(monkeypatch):
    """A GPU on which nothing runs but the choice of a recipe and the trials, which are faked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("qbheat_det.engine.run_config.choose_device", lambda device: device)


@pytest.mark.parametrize(
    ("start", "largest", "memory", "tried"),
    [
        (8, 64, 100, [8, 16, 32, 64]),
        (8, 63, 100, [8, 16, 32]),
        (8, 64, 20, [8, 16, 32]),
        (8, 8, 100, [8]),
        (8, 64, 3, [8, 4, 2]),
        (6, 64, 1, [6, 3, 1]),
        (8, 64, 0, [8, 4, 2, 1]),
    ],
)
def test_the_batch_is_doubled_or_halved_until_it_fits(start, largest, memory, tried):
    calls = []

    def fits(size):
        calls.append(size)
        return size <= memory

    found = find_largest(fits, start, largest)
    assert calls == tried
    assert found == max((size for size in tried if size <= memory), default=0)


def test_a_batch_leaves_enough_steps():
    cfg = load_config("custom/retinanet_lite0_gpu.yaml")
    assert limit_batch(cfg, 448) == 24 * 448 // cfg.SOLVER.MIN_ITER == 21
    assert limit_batch(cfg, 10) == cfg.SOLVER.IMS_PER_BATCH
    assert limit_batch(cfg, 10**6) == cfg.SOLVER.LARGEST_BATCH
    cfg.SOLVER.MIN_ITER = 0
    assert limit_batch(cfg, 10) == cfg.SOLVER.LARGEST_BATCH


def test_the_largest_batch_has_the_widest_and_the_tallest_image():
    shapes = [(64, 96), (64, 80), (90, 64), (64, 64)]
    assert find_canvas(shapes, grouped=False) == (90, 96)
    assert find_canvas(shapes, grouped=True) == (64, 96)
    assert find_canvas([*shapes, (100, 64)], grouped=True) == (100, 64)


def test_images_of_a_trial_are_the_largest(flags):
    stage = assemble_run(flags)[-1]
    images, number = draw_largest_images(stage.cfg)
    records = find_task(stage.cfg).load_training_set(stage.cfg)
    assert number == len(records) == 4
    most = max(len(record["annotations"]) for record in records)
    assert len(images[0]["instances"]) == most
    height, width = images[0]["image"].shape[1:]
    assert min(height, width) >= 64
    for image in images:
        assert min(image["image"].shape[1:]) == 64  # the largest of the sizes, never a smaller one
        assert image["image"].shape[1] <= height
        assert image["image"].shape[2] <= width
    cropped = [*flags.opts, "INPUT.DETR_CROP_RESIZE", "[64]"]
    stage = assemble_run(dataclasses.replace(flags, opts=cropped))[-1]
    images, _ = draw_largest_images(stage.cfg)
    assert images[0]["image"].shape == (3, 96, 96)  # a crop may have any shape


@pytest.fixture
def tiny_cfg(few_data, tmp_path):
    return build_config(parse(tmp_path / "run", few_data, {}))


def test_steps_that_need_more_than_the_memory_end_the_search(tiny_cfg, monkeypatch):
    """The memory of a device that holds the activations of five images."""
    cfg = tiny_cfg
    images, _ = draw_largest_images(cfg)
    build = Trainer.build_model

    def build_limited(cfg):
        model = build(cfg)

        def allocate(_, inputs):
            if len(inputs[0]) > 5:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        model.register_forward_pre_hook(allocate)
        return model

    monkeypatch.setattr(Trainer, "build_model", build_limited)
    monkeypatch.setattr(batch_size, "gc", Mock())  # nothing to collect, which would take a while
    trials = try_batches(cfg, images, 2, 16)
    assert [(trial.batch_size, trial.fits) for trial in trials] == [
        (2, True),
        (4, True),
        (8, False),
    ]
    assert all(trial.rate > 0 for trial in trials[:2])
    assert "8 do not fit" in str(trials[2])
    trials = try_batches(cfg, images, 16, 16)
    assert [(trial.batch_size, trial.fits) for trial in trials] == [
        (16, False),
        (8, False),
        (4, True),
    ]

    def fail(*_):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(batch_size, "_measure", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        try_batches(cfg, images, 2, 16)


def assemble_with_trials(flags, trials, monkeypatch, *, error="", others=None):
    """Assembles a run whose trials are given; ``others`` are the batches of other processes."""
    calls = []

    def run(cfg, images, start, largest):
        calls.append((start, largest))
        return trials, error

    def gather(value):
        if isinstance(value, int) and others:
            return [value, *others]
        return [value]

    monkeypatch.setattr(batch_size, "run_trials", run)
    monkeypatch.setattr(batch_size.comm, "all_gather", gather)
    return assemble_run(flags)[-1], calls


def test_a_run_on_a_gpu_takes_the_batch_of_its_trials(flags, on_gpu, monkeypatch):
    trials = [Trial(8, True, 2**30, 100.0), Trial(16, True, 2**31, 150.0), Trial(32, False)]
    flags = dataclasses.replace(flags, epochs=1000)
    stage, calls = assemble_with_trials(flags, trials, monkeypatch)
    assert stage.cfg.SOLVER.IMS_PER_BATCH == 16
    assert calls == [(8, 64)]
    for words in ("16 take 2.0 GiB (150 images/s)", "32 do not fit", "IMS_PER_BATCH is 16"):
        assert words in stage.title
    given = dataclasses.replace(flags, batch=4)
    stage, calls = assemble_with_trials(given, trials, monkeypatch)
    assert (stage.cfg.SOLVER.IMS_PER_BATCH, calls) == (4, [])
    stage, _ = assemble_with_trials(flags, [], monkeypatch, error="ImportError: no module")
    assert stage.cfg.SOLVER.IMS_PER_BATCH == 8
    assert "ImportError: no module" in stage.title
    with pytest.raises(UserError, match="--image-size"):
        assemble_with_trials(flags, [Trial(1, False)], monkeypatch)


def test_processes_agree_on_the_smallest_batch(flags, on_gpu, monkeypatch):
    monkeypatch.setattr(batch_size.comm, "get_world_size", lambda: 4)
    trials = [Trial(2, True), Trial(4, True), Trial(8, True)]
    flags = dataclasses.replace(flags, epochs=1000)
    stage, calls = assemble_with_trials(flags, trials, monkeypatch, others=[8, 4, 8])
    assert stage.cfg.SOLVER.IMS_PER_BATCH == 4 * 4
    assert calls == [(2, 16)]


def test_a_resumed_run_keeps_its_batch_and_its_recipe(flags, on_gpu, monkeypatch):
    trials = [Trial(8, True), Trial(16, True)]
    flags = dataclasses.replace(flags, size="")
    stage, _ = assemble_with_trials(flags, trials, monkeypatch)
    stage.folder.mkdir()
    (stage.folder / "config.yaml").write_text(dump_config(stage.cfg))
    (stage.folder / "model_0000001.pth").touch()
    (stage.folder / "run.json").write_text(json.dumps([{"device": "cuda (a card)"}]))
    resumed = dataclasses.replace(flags, resume=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    again, calls = assemble_with_trials(resumed, [], monkeypatch)
    assert calls == []
    assert again.cfg.MODEL.DEVICE == "cpu"
    assert again.cfg.SOLVER.IMS_PER_BATCH == 16
    assert again.resume
    (stage.folder / "run.json").write_text(json.dumps([{"device": "cpu"}]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_recipe(resumed) == "custom/retinanet_lite0_finetune.yaml"


def test_the_recipe_is_chosen_by_device_and_size(flags, on_gpu, monkeypatch):
    chosen = [choose_recipe(dataclasses.replace(flags, size=size)) for size in ("", *SIZES)]
    assert chosen[0] == chosen[1] == "custom/retinanet_lite0_gpu.yaml"
    assert len(set(chosen)) == 3
    on_cpu = dataclasses.replace(flags, size="", device="cpu")
    assert choose_recipe(on_cpu) == "custom/retinanet_lite0_finetune.yaml"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_recipe(dataclasses.replace(flags, size="")) == choose_recipe(on_cpu)
    for wrong in ({"size": "xl"}, {"config_file": chosen[0]}):
        with pytest.raises(UserError, match="--size"):
            dataclasses.replace(flags, **wrong)
    folder = str(Path(flags.data).parent / "images")
    with pytest.raises(UserError, match="--size is for detectors"):
        choose_recipe(dataclasses.replace(flags, data=None, images=folder))


def test_minutes_do_not_change_images_whose_batch_was_found(flags, monkeypatch):
    monkeypatch.setattr(training, "fit_minutes", lambda stages, flags, build: flags.image_size)
    flags = dataclasses.replace(flags, minutes=5)
    assert training.plan_run(flags) == 64
    assert (
        training.plan_run(
            dataclasses.replace(flags, opts=[*flags.opts, "SOLVER.LARGEST_BATCH", "0"])
        )
        is None
    )


def test_workers_leave_a_core_to_each_process(flags, monkeypatch):
    opts = ["MODEL.WEIGHTS", "", *FAST[:6], "DATASETS.VAL_FRACTION", "0"]
    flags = dataclasses.replace(flags, opts=opts)
    for cores, processes, expected in ((32, 1, 16), (9, 2, 4), (1, 1, 1)):
        monkeypatch.setattr(batch_size, "count_cores", lambda cores=cores: cores)
        monkeypatch.setattr(comm, "get_local_size", lambda processes=processes: processes)
        assert assemble_run(flags)[-1].cfg.DATALOADER.NUM_WORKERS == expected
    assert count_cores() >= 1


@pytest.mark.slow
def test_trials_run_in_a_process_of_their_own(tiny_cfg):
    cfg = tiny_cfg
    images, _ = draw_largest_images(cfg)
    trials, error = run_trials(cfg, images, 2, 4)
    assert error == ""
    assert [(trial.batch_size, trial.fits) for trial in trials] == [(2, True), (4, True)]
    broken = cfg.clone()
    broken.defrost()
    broken.MODEL.META_ARCHITECTURE = "Nothing"
    trials, error = run_trials(broken, images, 2, 4)
    assert trials == []
    assert "Nothing" in error


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_each_recipe_trains(size, few_data, tmp_path):
    data = ["--data", str(few_data / "annotations.json"), "--images", str(few_data / "images")]
    run_tool(
        [
            *("--size", size, *data, "--output", str(tmp_path / "run"), "--device", "cpu", *FAST),
            *("SOLVER.EPOCHS", "0.0", "SOLVER.MAX_ITER", "3", "SOLVER.IMS_PER_BATCH", "2"),
            *("SOLVER.WARMUP_EPOCHS", "0.0", "SOLVER.CHECKPOINT_EPOCHS", "0.0"),
            *("TEST.EVAL_EPOCHS", "0.0", "MODEL.WEIGHTS", ""),
        ]
    )
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"--size {size} is made for a GPU" in log
    assert (tmp_path / "run" / "model_final.safetensors").is_file()

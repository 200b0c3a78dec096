# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Epochs in iterations and rates by batch, against hand arithmetic and a counter of images."""

import pytest
import torch

from qbheat_det.config import get_cfg, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.solver import build_lr_scheduler, count_epochs, describe_schedule, resolve_schedule

COCO = 118287


def config(**solver):
    """The defaults with keys of SOLVER changed."""
    cfg = get_cfg()
    for key, value in solver.items():
        assert key in cfg.SOLVER, key
        cfg.SOLVER[key] = value
    return cfg


def rates(cfg):
    """The learning rate of every iteration."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], lr=cfg.SOLVER.BASE_LR)
    scheduler = build_lr_scheduler(cfg, optimizer)
    found = []
    for _ in range(cfg.SOLVER.MAX_ITER):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_coco_in_epochs_is_what_the_paper_trains():
    cfg = config(EPOCHS=500.0, STEP_EPOCHS=[400], WARMUP_EPOCHS=0.5, IMS_PER_BATCH=16)
    cfg.SOLVER.CHECKPOINT_EPOCHS = 5.0
    cfg.TEST.EVAL_EPOCHS = 10.0
    resolved = resolve_schedule(cfg, num_images=COCO)
    # An epoch is 118,287 / 16 = 7,392.9375 iterations.
    assert resolved.SOLVER.MAX_ITER == 3696469
    assert resolved.SOLVER.STEPS == (2957175,)
    assert resolved.SOLVER.WARMUP_ITERS == 3697
    assert resolved.SOLVER.CHECKPOINT_PERIOD == 36965
    assert resolved.TEST.EVAL_PERIOD == 73930


@pytest.mark.parametrize(
    ("opts", "iterations"),
    [
        ("", 1000),  # Detectron2's default
        ("SOLVER.WARMUP_EPOCHS 0", 0),
        ("SOLVER.WARMUP_EPOCHS 0.5", 50),
        ("SOLVER.WARMUP_EPOCHS 0 SOLVER.WARMUP_ITERS 7", 7),
        ("SOLVER.WARMUP_EPOCHS None SOLVER.WARMUP_ITERS 7", 7),
    ],
)
def test_a_warm_up_of_no_epochs_is_none(opts, iterations):
    cfg = load_config(None, f"SOLVER.IMS_PER_BATCH 1 SOLVER.EPOCHS 20 {opts}".split())
    resolved = resolve_schedule(cfg, num_images=100)
    assert resolved.SOLVER.WARMUP_ITERS == iterations
    assert (rates(resolved)[0] == cfg.SOLVER.BASE_LR) == (iterations == 0)


def test_no_warm_up_on_the_command_line_overrides_that_of_a_file(tmp_path):
    for key, value in (("WARMUP_EPOCHS", 2.0), ("WARMUP_ITERS", 300)):
        (tmp_path / "config.yaml").write_text(f"SOLVER: {{{key}: {value}}}")
        cfg = load_config(tmp_path / "config.yaml", ["SOLVER.WARMUP_EPOCHS", "0"])
        assert resolve_schedule(cfg, num_images=100).SOLVER.WARMUP_ITERS == 0


def test_few_images_are_seen_more_often():
    cfg = config(EPOCHS=10.0, WARMUP_EPOCHS=0.8, IMS_PER_BATCH=8, MIN_ITER=600)
    cfg.TEST.EVAL_EPOCHS = 5.0
    # 10 epochs of 40 images are 50 iterations, so all epochs are multiplied by 12.
    resolved = resolve_schedule(cfg, num_images=40)
    assert resolved.SOLVER.MAX_ITER == 600
    assert resolved.SOLVER.WARMUP_ITERS == 48
    assert resolved.TEST.EVAL_PERIOD == 300
    assert count_epochs(cfg, 40) == 120
    assert resolve_schedule(resolved, num_images=40) == resolved
    assert resolve_schedule(cfg, num_images=800).SOLVER.MAX_ITER == 1000


def test_the_rate_follows_the_batch():
    for scaling, reference, batch, expected in (
        ("linear", 16, 4, 0.25), ("linear", 16, 64, 4.0), ("sqrt", 16, 4, 0.5), ("sqrt", 0, 64, 1.0)
    ):  # fmt: skip
        cfg = config(BASE_LR=1.0, LR_SCALING=scaling, REFERENCE_BATCH_SIZE=reference)
        cfg.SOLVER.IMS_PER_BATCH = batch
        resolved = resolve_schedule(cfg, num_images=100)
        assert resolved.SOLVER.BASE_LR == pytest.approx(expected)
        assert resolved.SOLVER.REFERENCE_BATCH_SIZE == (batch if reference else 0)
    # The end of a cosine follows as the rate does.
    cfg = config(BASE_LR=1.0, REFERENCE_BATCH_SIZE=16, IMS_PER_BATCH=4)
    cfg.SOLVER.BASE_LR_END = 0.2  # Detectron2 v0.6 has no such key
    resolved = resolve_schedule(cfg, num_images=100)
    assert (resolved.SOLVER.BASE_LR, resolved.SOLVER.BASE_LR_END) == pytest.approx((0.25, 0.05))


def test_the_config_of_a_finished_run_trains_the_same_again(tmp_path):
    cfg = config(EPOCHS=9.0, STEP_EPOCHS=[6, 8], WARMUP_EPOCHS=0.3, CHECKPOINT_EPOCHS=1.0)
    scaling = {"BASE_LR": 0.3, "LR_SCALING": "sqrt", "REFERENCE_BATCH_SIZE": 16}
    cfg.SOLVER.update(scaling | {"IMS_PER_BATCH": 6})
    cfg.TEST.EVAL_EPOCHS = 2.0
    frozen = cfg.clone()
    frozen.freeze()
    first = resolve_schedule(frozen, num_images=1000)
    assert first.is_frozen()
    (tmp_path / "config.yaml").write_text(first.dump())
    written = load_config(tmp_path / "config.yaml")
    again = resolve_schedule(written, num_images=1000)
    assert (again.SOLVER, again.TEST) == (first.SOLVER, first.TEST)

    # Another batch or other data then are what they would have been from the start.
    for batch, num_images in ((12, 1000), (6, 3000), (5, 77)):
        cfg.SOLVER.IMS_PER_BATCH = written.SOLVER.IMS_PER_BATCH = batch
        again = resolve_schedule(written, num_images=num_images)
        direct = resolve_schedule(cfg, num_images=num_images)
        assert again.SOLVER.BASE_LR == pytest.approx(direct.SOLVER.BASE_LR, rel=1e-12)
        again.SOLVER.BASE_LR = direct.SOLVER.BASE_LR
        assert (again.SOLVER, again.TEST) == (direct.SOLVER, direct.TEST)


def test_steps_and_warm_up_in_epochs_reach_the_optimizer():
    cfg = config(EPOCHS=10.0, STEP_EPOCHS=[5, 8], WARMUP_EPOCHS=2.0, WARMUP_FACTOR=0.1)
    cfg.SOLVER.update({"IMS_PER_BATCH": 4, "BASE_LR": 0.5, "REFERENCE_BATCH_SIZE": 2})
    found = rates(resolve_schedule(cfg, num_images=20))  # 5 iterations an epoch, rate 1
    assert len(found) == 50
    for iteration, rate in enumerate(found):
        warm = 0.1 + 0.9 * iteration / 10 if iteration < 10 else 1.0
        drop = 0.1 ** ((iteration >= 25) + (iteration >= 40))
        assert rate == pytest.approx(warm * drop), iteration


def test_the_log_of_a_run_names_iterations_rates_and_a_warm_up_that_is_cut_short():
    cfg = config(
        EPOCHS=12.0, STEP_EPOCHS=[8, 11], BASE_LR=0.01, REFERENCE_BATCH_SIZE=16, IMS_PER_BATCH=8,
        WARMUP_ITERS=750,
    )  # fmt: skip
    text = describe_schedule(cfg, resolve_schedule(cfg, num_images=1000), 1000)
    for number in (
        "1,500 iterations (12 epochs)",
        "8 images an iteration",
        "rate: 0.005 (0.01 for 16 images",
        "1,375",
    ):
        assert number in text
    assert "TOKEN_MULTIPLIER" not in text
    assert "Note" not in text
    cfg.SOLVER.WARMUP_ITERS = 751
    text = describe_schedule(cfg, resolve_schedule(cfg, num_images=1000), 1000)
    assert "SOLVER.WARMUP_ITERS" in text
    cfg = config(MAX_ITER=10, STEPS=(3, 10, 30000), WARMUP_ITERS=0, BASE_LR=1.0)
    assert rates(cfg) == pytest.approx([1.0] * 3 + [0.1] * 7)  # steps from the end on do nothing
    cfg = config(MAX_ITER=20, STEPS=())
    resolved = resolve_schedule(cfg, num_images=5)
    assert resolved == cfg  # epochs of zero leave the iterations alone
    assert "SOLVER.WARMUP_ITERS" in describe_schedule(cfg, resolved, 5)


BAD = [
    ({"IMS_PER_BATCH": 0}, "IMS_PER_BATCH"),
    ({"EPOCHS": -1.0}, r"SOLVER\.EPOCHS"),
    ({"EPOCHS": float("nan")}, r"SOLVER\.EPOCHS"),
    ({"STEP_EPOCHS": ["eight"]}, "STEP_EPOCHS"),
    ({"STEP_EPOCHS": [8, 3]}, "STEP_EPOCHS"),
    ({"STEP_EPOCHS": [0, 3]}, "STEP_EPOCHS"),
    ({"WARMUP_EPOCHS": -2.0}, "WARMUP_EPOCHS"),
    ({"CHECKPOINT_EPOCHS": -2.0}, "CHECKPOINT_EPOCHS"),
    ({"MAX_ITER": 0}, "MAX_ITER"),
    ({"WARMUP_ITERS": -1}, "WARMUP_ITERS"),
    ({"CHECKPOINT_PERIOD": 0}, "CHECKPOINT_PERIOD"),
    ({"STEPS": (30, 10)}, r"SOLVER\.STEPS.*\(30, 10\)"),
    ({"EPOCHS": 99.0, "STEP_EPOCHS": [80, 81], "IMS_PER_BATCH": 64}, r"SOLVER\.STEPS"),
    ({"LR_SCALING": "square"}, "LR_SCALING.*linear, sqrt"),
    ({"REFERENCE_BATCH_SIZE": -1}, "REFERENCE_BATCH_SIZE"),
    ({"REFERENCE_WORLD_SIZE": 8}, "REFERENCE_WORLD_SIZE"),
    ({"BASE_LR": 0.0}, "BASE_LR"),
    ({"WARMUP_FACTOR": -0.1}, "WARMUP_FACTOR"),
    ({"WARMUP_METHOD": "burnin"}, "WARMUP_METHOD"),
    ({"LR_SCHEDULER_NAME": "CosineLR"}, "WarmupCosineLR"),
    ({"TEST.EVAL_PERIOD": -1}, r"TEST\.EVAL_PERIOD"),
    ({"TEST.EVAL_EPOCHS": -1.0}, r"TEST\.EVAL_EPOCHS"),
]


@pytest.mark.parametrize(("changes", "key"), BAD, ids=str)
def test_invalid_schedules_are_refused_by_key(changes, key):
    cfg = config(**{name: value for name, value in changes.items() if "." not in name})
    for name, value in changes.items():
        if "." in name:
            cfg.merge_from_list([name, value])
    with pytest.raises(UserError, match=key):
        resolve_schedule(cfg, num_images=10)
    with pytest.raises(UserError, match=r"DATASETS\.TRAIN"):
        resolve_schedule(config(), num_images=0)

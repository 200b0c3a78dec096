# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A run that was stopped goes on as if it had not been, to the last bit."""

import multiprocessing
import random
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from detectron2.modeling import build_model
from torch.utils._pytree import tree_leaves_with_path

from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.config import get_cfg, get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine import RunFlags, assemble_evaluation
from qbheat_det.engine.hooks import SKIPPED_FILE
from qbheat_det.engine.logs import warn_of_weights
from qbheat_det.engine.resume import check_same_config, check_same_images
from qbheat_det.engine.run_record import check_start, find_start
from qbheat_det.engine.step import StepTrainer
from qbheat_det.solver import resolve_schedule

from . import tiny_training
from .tiny_training import MF_DETR, TINY_ENCODER, losses, read_opts, state, words_of

CASES = {
    "retinanet": {},
    "mf_detr_with_everything": {
        **MF_DETR,
        **read_opts("""
SOLVER.EMA.ENABLED True SOLVER.EMA.DECAY 0.9 SOLVER.ACCUMULATE 2 SOLVER.AMP.ENABLED True
SOLVER.AMP.PRECISION bfloat16 DATALOADER.NUM_WORKERS 1 TEST.EVAL_PERIOD 3
"""),
    },
}


def break_at(iteration, monkeypatch):
    """Makes the next training stop as by Ctrl-C, before that iteration."""
    run_step = StepTrainer.run_step

    def run_or_stop(self):
        if self.iter == iteration:
            monkeypatch.setattr(StepTrainer, "run_step", run_step)
            raise KeyboardInterrupt
        run_step(self)

    monkeypatch.setattr(StepTrainer, "run_step", run_or_stop)


def assert_same_bits(found, expected):
    """Compares nested states."""
    pairs = zip(tree_leaves_with_path(found), tree_leaves_with_path(expected), strict=True)
    for (where, value), (path, wanted) in pairs:
        assert (where, type(value)) == (path, type(wanted))
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(value, wanted, rtol=0, atol=0, equal_nan=True)
        else:
            assert value == wanted, where


def comparable(checkpoint):
    """Leaves out the config's text, which names the output folder, and the code's commit."""
    aside = ("config", "commit")
    info = {key: value for key, value in checkpoint["info"].items() if key not in aside}
    return {**checkpoint, "info": info}


@pytest.fixture(scope="module")
def whole_runs(whole_run, tiny_data, tmp_path_factory):
    """Folders of the unbroken runs by case."""
    folder = tmp_path_factory.mktemp("everything")
    tiny_training.train(folder, tiny_data, CASES["mf_detr_with_everything"])
    return {"retinanet": whole_run, "mf_detr_with_everything": folder}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_run_ends_with_the_bits_of_an_unbroken_one(
    case, whole_runs, train_afresh, tmp_path, monkeypatch
):
    whole, broken = whole_runs[case], tmp_path
    break_at(3, monkeypatch)  # between two checkpoints
    with pytest.raises(KeyboardInterrupt):
        train_afresh(broken, CASES[case], "--resume")
    train_afresh(broken, CASES[case], "--resume")
    assert losses(broken) == losses(whole)
    assert sorted(losses(whole)) == list(range(5))
    assert_same_bits(comparable(state(broken)), comparable(state(whole)))
    if case == "retinanet":  # a checkpoint that was cut off, and other workers
        (broken / "model_final.pth").unlink()
        last = broken / "model_0000003.pth"
        last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
        (broken / "last_checkpoint").write_text(last.name)
        train_afresh(broken, {"DATALOADER.NUM_WORKERS": "2"}, "--resume")
        assert_same_bits(state(broken)["model"], state(whole)["model"])


@pytest.mark.parametrize("case", ["retinanet", "tiles", "cached"])
def test_a_detector_trains_on_without_broken_images_and_names_them(
    case, tiny_data, tmp_path, monkeypatch
):
    opts = {
        "SOLVER.MAX_ITER": "8",
        "DATASETS.CHECK_IMAGES": "False",  # the images break after the check
        **({"INPUT.TILE": "40"} if case == "tiles" else {}),
    }
    if case == "cached":
        opts |= {
            **MF_DETR,
            **read_opts("""
INPUT.DETR_CROP_RESIZE [] MODEL.BACKBONE.FREEZE_AT 5 INPUT.FIXED_VIEWS.COUNT 2
MODEL.CACHE_FEATURES.ENABLED True MODEL.CACHE_FEATURES.DTYPE float32
"""),
            "MODEL.CACHE_FEATURES.FOLDER": str(tmp_path / "cache"),
        }
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    images = sorted((data / "images").iterdir())
    images[3].write_bytes(b"")
    images[5].write_bytes(images[5].read_bytes()[:400])
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    results = tiny_training.train(whole, data, opts)
    break_at(5, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        tiny_training.train(broken, data, opts, "--resume")
    assert str(tiny_training.train(broken, data, opts, "--resume")) == str(results)
    assert_same_bits(comparable(state(broken)), comparable(state(whole)))
    for folder in (whole, broken):
        lines = (folder / SKIPPED_FILE).read_text().splitlines()
        named = [path for path in images if any(str(path) in line for line in lines)]
        # Not every tile of the images is drawn in eight steps.
        assert named == images[3:6:2] or (case == "tiles" and named == [images[3]])
        assert "skips 2 images" in (folder / "log.txt").read_text()


def test_seed_and_weights_are_kept_and_another_number_of_processes_is_logged(
    train_afresh, tmp_path
):
    opts = {"SEED": "-1", "SOLVER.MAX_ITER": "1"}
    train_afresh(tmp_path, opts)
    content = (tmp_path / "model_final.pth").read_bytes()
    assert train_afresh(tmp_path, opts, "--resume") == {}  # nothing is left to do
    assert (tmp_path / "model_final.pth").read_bytes() == content
    checkpoint = state(tmp_path)
    seed = checkpoint["trainer"]["seed"]
    checkpoint["trainer"]["processes"] = 2
    torch.save(checkpoint, tmp_path / "model_final.pth")
    train_afresh(tmp_path, {**opts, "SOLVER.MAX_ITER": "2"}, "--resume")
    assert state(tmp_path)["trainer"]["seed"] == seed
    assert state(tmp_path)["iteration"] == 1
    assert "1 processes instead of 2" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("key", "before", "now", "may_change"),
    [
        ("INPUT.MIN_SIZE_TRAIN", (64,), (32,), False),
        ("SEED", 3, 77, False),
        ("SOLVER.BASE_LR", 0.1, 0.2, False),
        ("SOLVER.IMS_PER_BATCH", 16, 8, False),
        ("SOLVER.ACCUMULATE", 1, 2, True),
        ("SEED", 3, -1, True),
        ("SOLVER.MAX_ITER", 8, 9, True),
        ("MODEL.CHANNELS_LAST", None, False, True),
    ],
)
def test_a_resumed_run_has_the_config_that_it_began_with(key, before, now, may_change):
    cfg = get_cfg()
    cfg.SEED = 3
    cfg.merge_from_list([key, before])
    saved = cfg.dump()
    cfg.merge_from_list([key, now])
    if may_change:
        check_same_config(saved, cfg)
    else:
        with pytest.raises(UserError, match=f"{key} "):
            check_same_config(saved, cfg)


def test_a_key_that_is_newer_than_the_checkpoint_had_its_default():
    cfg = get_cfg()
    saved = cfg.clone()
    del saved.MODEL.TIMM["FREEZE_NORMS"]
    check_same_config(saved.dump(), cfg)
    cfg.MODEL.TIMM.FREEZE_NORMS = True
    with pytest.raises(UserError, match=r"MODEL\.TIMM\.FREEZE_NORMS False -> True"):
        check_same_config(saved.dump(), cfg)


def _resolve(opts, num_images):
    """Returns the config of a run with the keys in iterations."""
    cfg = get_cfg()
    cfg.merge_from_list(opts.split())
    return resolve_schedule(cfg, num_images=num_images)


def test_a_change_of_the_length_is_named_before_the_keys_that_follow_from_it():
    keys = "SOLVER.IMS_PER_BATCH 4 SOLVER.WARMUP_EPOCHS 1.0 SOLVER.STEP_EPOCHS (2.0,) "
    before = _resolve(f"{keys} SOLVER.EPOCHS 3.0 SOLVER.MIN_ITER 60", 40)
    now = _resolve(f"{keys} SOLVER.EPOCHS 18.0 SOLVER.MIN_ITER 0", 40)
    with pytest.raises(UserError) as caught:
        check_same_config(before.dump(), now)
    assert str(caught.value).endswith(
        "the config differs: SOLVER.EPOCHS 3.0 -> 18.0 and SOLVER.MIN_ITER 60 -> 0, from which "
        "SOLVER.STEPS [40] -> [20] and SOLVER.WARMUP_ITERS 20 -> 10 follow"
    )
    now = _resolve(f"{keys} SOLVER.EPOCHS 18.0 SOLVER.MIN_ITER 60 SOLVER.BASE_LR 0.5", 40)
    now.SOLVER.STEPS = before.SOLVER.STEPS
    with pytest.raises(
        UserError, match=r"WARMUP_ITERS 20 -> 10 follows; SOLVER.BASE_LR .* -> 0.5$"
    ):
        check_same_config(before.dump(), now)
    before, now = (_resolve(f"SOLVER.WARMUP_ITERS {number}", 40) for number in (9, 25))
    with pytest.raises(UserError, match=r"differs: SOLVER.WARMUP_ITERS 9 -> 25$"):
        check_same_config(before.dump(), now)
    before, now = (_resolve(keys + "SOLVER.EPOCHS 3.0", number) for number in (40, 80))
    with pytest.raises(UserError, match=r"differs: SOLVER.STEPS .*; SOLVER.WARMUP_ITERS 10 -> 20$"):
        check_same_config(before.dump(), now)


def test_a_resumed_run_has_the_images_that_it_began_with():
    stream = SimpleNamespace(num_images=12, fingerprint=5, unlabelled=[1])
    check_same_images({"num_images": 12, "fingerprint": 5}, stream)
    for saved in ({"num_images": 11, "fingerprint": 5}, {"num_images": 12, "fingerprint": 6}):
        with pytest.raises(UserError, match=r"images.*--unlabelled"):
            check_same_images(saved, stream)
    with pytest.raises(UserError, match=r"MODEL\.WEIGHTS"):
        check_same_images({"iteration": 1}, stream)  # of Detectron2


@pytest.mark.parametrize(
    ("files", "flags", "weights", "refused"),
    [
        ((), ("resume",), "", ""),
        ((), (), "w.pth", ""),
        ((), ("resume",), "w.pth", "MODEL.WEIGHTS 'w.pth'"),
        (("tag", "checkpoint"), (), "", "--resume"),
        (("checkpoint",), (), "", "model_0000001.pth"),
        (("tag", "checkpoint"), ("resume",), "began.pth", ""),
        (("tag", "checkpoint"), ("resume",), "w.pth", "MODEL.WEIGHTS 'w.pth'"),
    ],
)
def test_resuming_and_starting_are_never_mixed(tmp_path, files, flags, weights, refused):
    if "checkpoint" in files:
        (tmp_path / "model_0000001.pth").touch()
        (tmp_path / "config.yaml").write_text("MODEL: {WEIGHTS: began.pth}")
    if "tag" in files:
        (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
    start = find_start(tmp_path, asked="resume" in flags)
    if not refused:
        check_start(start, weights)
        return
    with pytest.raises(UserError, match=refused):
        check_start(start, weights)


def test_an_evaluation_is_of_weights_or_of_a_checkpoint(tmp_path):
    flags = RunFlags(weights="w.pth", output=str(tmp_path), resume=True)
    with pytest.raises(UserError, match=r"MODEL\.WEIGHTS 'w\.pth'"):
        assemble_evaluation(flags)


def wait_for_moment(process, folder, rng):
    """Returns at a random moment of a run: while it starts, steps, or writes a checkpoint."""
    writes = rng.randrange(3)  # checkpoints to let through
    midway = rng.random() < 0.5
    delay = rng.uniform(0, 3 if writes == 0 else 0.5)
    tag = folder / "last_checkpoint"
    last = tag.read_text() if tag.exists() else ""
    while process.is_alive() and writes:
        now = tag.read_text() if tag.exists() else ""
        writes, last = writes - (now != last), now
        time.sleep(0.002)
    while midway and process.is_alive() and not list(folder.glob(".model_*.incomplete")):
        time.sleep(0.0005)
    if not midway:
        process.join(delay)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_killed_at_ten_moments_ends_with_the_bits_of_a_whole_one(case, tiny_data, tmp_path):
    # A checkpoint after every step, so that many kills come while one is written.
    opts = {**CASES[case], "SOLVER.CHECKPOINT_PERIOD": "1", "SOLVER.MAX_ITER": "40"}
    opts["TEST.EVAL_PERIOD"] = "20"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([tiny_training.__name__])

    def start(folder):
        process = context.Process(
            target=tiny_training.train_in_own_process, args=(str(folder), str(tiny_data), opts)
        )
        process.start()
        return process

    whole, killed, rng = tmp_path / "whole", tmp_path / "killed", random.Random(0)
    process = start(whole)
    process.join()
    assert process.exitcode == 0
    midway = 0
    for _ in range(10):
        process = start(killed)
        wait_for_moment(process, killed, rng)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run was over before ten kills"
        midway += bool(list(killed.glob(".model_*.incomplete")))
    assert midway, "no kill came while a checkpoint was written"
    process = start(killed)
    process.join()
    assert process.exitcode == 0
    assert not list(killed.glob(".*.incomplete"))
    assert losses(killed) == losses(whole)
    assert_same_bits(comparable(state(killed)), comparable(state(whole)))


def test_weights_for_other_pixels_and_a_frozen_random_encoder_are_warned_of(tmp_path, caplog):
    path = get_config_path("quick_schedules/retinanet_285M_cells.yaml")
    frozen = {**TINY_ENCODER, "MODEL.DEVICE": "cpu", "MODEL.BACKBONE.FREEZE_AT": "5"}
    cfg = load_config(path, words_of(frozen))
    model, file = build_model(cfg), str(tmp_path / "weights.safetensors")
    warn_of_weights(model, cfg)
    assert "frozen with random weights" in caplog.text
    caplog.clear()
    save_weights(file, model.state_dict(), WeightsInfo.from_config(cfg, iteration=1, commit=""))
    cfg.MODEL.WEIGHTS = file
    warn_of_weights(model, cfg)
    assert not caplog.messages
    cfg.INPUT.FORMAT = "BGR" if cfg.INPUT.FORMAT == "RGB" else "RGB"
    warn_of_weights(model, cfg)
    assert "INPUT.FORMAT" in caplog.text


def test_frozen_norms_of_random_weights_are_warned_of(caplog):
    recipe = get_config_path("custom/retinanet_lite0_finetune.yaml")
    words = ["MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", "", "MODEL.BACKBONE.FREEZE_AT", "0"]
    cfg = load_config(recipe, words)
    warn_of_weights(build_model(cfg), cfg)
    assert "MODEL.TIMM.FREEZE_NORMS False" in caplog.text
    caplog.clear()
    cfg.MODEL.TIMM.FREEZE_NORMS = False
    warn_of_weights(build_model(cfg), cfg)
    assert "frozen" not in caplog.text

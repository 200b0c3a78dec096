# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A run that was stopped goes on as if it had not been, to the last bit."""

import json
import multiprocessing
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.engine.resume import check_same_config
from qbheat_det.engine.step import StepTrainer

from . import tiny_training
from .conftest import TrainAfresh
from .tiny_training import MF_DETR, losses, state

AVERAGED = {"SOLVER.EMA.ENABLED": "True", "SOLVER.EMA.DECAY": "0.9"}
CASES = {
    "retinanet": {},
    "mf_detr_with_everything": {
        **MF_DETR,
        **AVERAGED,
        "MODEL.MF_DETR.DENOISING.GROUPS": "2",
        "MODEL.MF_DETR.QUERY_GROUPS.COUNT": "2",
        "SOLVER.ACCUMULATE": "2",
        "SOLVER.AMP.ENABLED": "True",
        "SOLVER.AMP.PRECISION": "bfloat16",
        "DATALOADER.NUM_WORKERS": "1",
        "TEST.EVAL_PERIOD": "3",
    },
}


def break_at(iteration: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the next training stop as by Ctrl-C, before that iteration."""
    run_step = StepTrainer.run_step

    def run_or_stop(self: StepTrainer) -> None:
        if self.iter == iteration:
            monkeypatch.setattr(StepTrainer, "run_step", run_step)
            raise KeyboardInterrupt
        run_step(self)

    monkeypatch.setattr(StepTrainer, "run_step", run_or_stop)


def assert_same_bits(found: Any, expected: Any, where: str = "") -> None:
    """Compares nested states; seconds and file names have no place in them."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=where)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same_bits(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same_bits(found[index], value, f"{where}/{index}")
    else:
        assert found == expected, where


def comparable(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the config's text, which names the output folder, and the code's commit."""
    aside = ("config", "commit")
    info = {key: value for key, value in checkpoint["info"].items() if key not in aside}
    return {**checkpoint, "info": info}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_run_ends_with_the_bits_of_an_unbroken_one(
    case: str, train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_afresh(whole, CASES[case])
    for iteration in (3, 6):  # between two checkpoints, and just after one
        break_at(iteration, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            train_afresh(broken, CASES[case], "--resume")
    train_afresh(broken, CASES[case], "--resume")
    assert losses(broken) == losses(whole)
    assert sorted(losses(whole)) == list(range(8))
    assert_same_bits(comparable(state(broken)), comparable(state(whole)))


def test_workers_and_micro_batches_may_change_on_the_way(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_afresh(whole, {})
    break_at(5, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train_afresh(broken, {})
    train_afresh(broken, {"DATALOADER.NUM_WORKERS": "2"}, "--resume")
    assert_same_bits(state(broken)["model"], state(whole)["model"])


def test_resuming_a_finished_run_does_nothing(train_afresh: TrainAfresh, tmp_path: Path) -> None:
    train_afresh(tmp_path, {"SOLVER.MAX_ITER": "2"})
    before = (tmp_path / "model_final.pth").read_bytes()
    assert train_afresh(tmp_path, {"SOLVER.MAX_ITER": "2"}, "--resume") == {}
    assert (tmp_path / "model_final.pth").read_bytes() == before


def test_resume_without_a_checkpoint_begins(train_afresh: TrainAfresh, tmp_path: Path) -> None:
    train_afresh(tmp_path, {"SOLVER.MAX_ITER": "1"}, "--resume")
    assert state(tmp_path)["iteration"] == 0


@pytest.fixture(scope="module")
def finished(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of one iteration, for tests that leave it as it is."""
    folder = tmp_path_factory.mktemp("finished")
    tiny_training.train(folder, tiny_data, {"SOLVER.MAX_ITER": "1"})
    return folder


@pytest.mark.parametrize(
    ("opts", "flags", "sentence"),
    [
        ({}, (), "add --resume to continue it, or name another OUTPUT_DIR"),
        ({"MODEL.WEIGHTS": "{}/model_final.pth"}, ("--resume",), "starts a new one"),
        ({"SOLVER.BASE_LR": "0.5"}, ("--resume",), r"SOLVER.BASE_LR .* -> "),
        ({"SOLVER.IMS_PER_BATCH": "4"}, ("--resume",), r"SOLVER.IMS_PER_BATCH 2 -> 4"),
        ({"INPUT.MIN_SIZE_TRAIN": "(32,)"}, ("--resume",), "INPUT.MIN_SIZE_TRAIN"),
        ({"MODEL.BACKBONE.FREEZE_AT": "3"}, ("--resume",), "FREEZE_AT 0 -> 3"),
        ({"SEED": "77"}, ("--resume",), "SEED 3 -> 77"),
    ],
)
def test_continuing_and_starting_are_never_mixed(
    train_afresh: TrainAfresh,
    finished: Path,
    opts: dict[str, str],
    flags: tuple[str, ...],
    sentence: str,
) -> None:
    names = ("config.yaml", "metrics.json", "model_final.pth", "model_final.safetensors")
    before = {name: (finished / name).read_bytes() for name in names}
    changed = {key: value.format(finished) for key, value in opts.items()}
    with pytest.raises(UserError, match=sentence):
        train_afresh(finished, {"SOLVER.MAX_ITER": "1", **changed}, *flags)
    assert {name: (finished / name).read_bytes() for name in names} == before


def test_a_run_without_its_tag_is_a_run_all_the_same(
    train_afresh: TrainAfresh, finished: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "last_checkpoint").unlink()
    with pytest.raises(UserError, match=r"model_final\.pth.*--resume"):
        train_afresh(folder, {"SOLVER.MAX_ITER": "1"})


def test_weights_to_start_from_do_not_go_with_a_run_that_is_not_there(
    train_afresh: TrainAfresh, finished: Path, tmp_path: Path
) -> None:
    weights = {"MODEL.WEIGHTS": str(finished / "model_final.pth")}
    with pytest.raises(UserError, match="finds no run in"):
        train_afresh(tmp_path, weights, "--resume")


def test_other_data_do_not_continue_a_run(
    train_afresh: TrainAfresh, tiny_data: Path, tmp_path: Path
) -> None:
    train_afresh(tmp_path / "run", {"SOLVER.MAX_ITER": "1"})
    fewer = shutil.copytree(tiny_data, tmp_path / "data")
    content = json.loads((fewer / "annotations.json").read_text())
    gone = content["images"].pop()["id"]
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != gone]
    (fewer / "annotations.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="on 12 training images, but there are 11 now"):
        train_afresh(tmp_path / "run", {"SOLVER.MAX_ITER": "2"}, "--resume", data=fewer)
    content = json.loads((tiny_data / "annotations.json").read_text())
    content["annotations"][0]["bbox"][0] += 1
    (fewer / "annotations.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="their order or their boxes"):
        train_afresh(tmp_path / "run", {"SOLVER.MAX_ITER": "2"}, "--resume", data=fewer)


def test_a_checkpoint_of_another_trainer_is_no_run_to_continue(
    train_afresh: TrainAfresh, tmp_path: Path
) -> None:
    train_afresh(tmp_path, {"SOLVER.MAX_ITER": "1"})
    checkpoint = state(tmp_path)
    for key in ("num_images", "fingerprint", "seed", "processes"):  # unknown to Detectron2
        del checkpoint["trainer"][key]
    torch.save(checkpoint, tmp_path / "model_final.pth")
    with pytest.raises(UserError, match="did not write"):
        train_afresh(tmp_path, {"SOLVER.MAX_ITER": "2"}, "--resume")


def test_a_drawn_seed_is_kept_by_the_run(train_afresh: TrainAfresh, tmp_path: Path) -> None:
    train_afresh(tmp_path, {"SEED": "-1", "SOLVER.MAX_ITER": "1"})
    seed = state(tmp_path)["trainer"]["seed"]
    train_afresh(tmp_path, {"SEED": "-1", "SOLVER.MAX_ITER": "2"}, "--resume")
    assert state(tmp_path)["trainer"]["seed"] == seed
    assert state(tmp_path)["iteration"] == 1


def test_another_number_of_processes_is_told(train_afresh: TrainAfresh, tmp_path: Path) -> None:
    train_afresh(tmp_path, {"SOLVER.MAX_ITER": "1"})
    checkpoint = state(tmp_path)
    checkpoint["trainer"]["processes"] = 2
    torch.save(checkpoint, tmp_path / "model_final.pth")
    train_afresh(tmp_path, {"SOLVER.MAX_ITER": "2"}, "--resume")
    log = (tmp_path / "log.txt").read_text()
    assert "with 1 processes instead of 2" in log


def test_a_damaged_last_checkpoint_gives_way_to_the_one_before(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_afresh(whole, {})
    break_at(6, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train_afresh(broken, {})
    last = broken / "model_0000005.pth"
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    train_afresh(broken, {}, "--resume")
    assert_same_bits(state(broken)["model"], state(whole)["model"])


def wait_for_moment(
    process: multiprocessing.process.BaseProcess, folder: Path, rng: random.Random
) -> None:
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
def test_a_run_killed_at_twenty_moments_ends_with_the_bits_of_a_whole_one(
    case: str, tiny_data: Path, tmp_path: Path
) -> None:
    # A checkpoint after every step, so that many kills come while one is written.
    opts = {**CASES[case], "SOLVER.CHECKPOINT_PERIOD": "1", "SOLVER.MAX_ITER": "60"}
    opts["TEST.EVAL_PERIOD"] = "20"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([tiny_training.__name__])

    def start(folder: Path) -> multiprocessing.process.BaseProcess:
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
    for _ in range(20):
        process = start(killed)
        wait_for_moment(process, killed, rng)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run was over before twenty kills"
        midway += bool(list(killed.glob(".model_*.incomplete")))
    assert midway, "no kill came while a checkpoint was written"
    process = start(killed)
    process.join()
    assert process.exitcode == 0
    assert not list(killed.glob(".*.incomplete"))
    assert losses(killed) == losses(whole)
    assert_same_bits(comparable(state(killed)), comparable(state(whole)))


def test_how_weights_predict_later_may_change_since_training_does_not_read_it() -> None:
    cfg = get_cfg()
    saved = cfg.dump()
    cfg.MODEL.DEPLOY.ENABLED = True
    cfg.MODEL.DEPLOY.PRECISION = "bfloat16"
    check_same_config(saved, cfg)


@pytest.mark.parametrize("before", [None, False, True])
@pytest.mark.parametrize("now", [None, False, True])
def test_how_maps_lie_in_memory_may_change(before: bool | None, now: bool | None) -> None:
    cfg = get_cfg()
    cfg.MODEL.CHANNELS_LAST = before
    saved = cfg.dump()
    cfg.MODEL.CHANNELS_LAST = now
    check_same_config(saved, cfg)

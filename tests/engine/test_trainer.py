# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a whole run leaves behind: averages, the best weights, few checkpoints, a record."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from detectron2.modeling import build_model

from qbheat_det.checkpoint import read_weights
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine import Trainer, evaluate
from qbheat_det.engine.evaluation import Evaluation
from qbheat_det.engine.step import StepTrainer

from .conftest import TrainAfresh
from .tiny_training import state

SOON = {"SOLVER.MAX_ITER": "4", "SOLVER.CHECKPOINT_PERIOD": "1", "SOLVER.CHECKPOINTS_KEPT": "0"}


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def test_the_average_is_that_of_all_weights_and_buffers(
    train_afresh: TrainAfresh, tmp_path: Path
) -> None:
    decay = 0.5
    train_afresh(
        tmp_path,
        {
            **SOON,
            "SOLVER.EMA.ENABLED": "True",
            "SOLVER.EMA.DECAY": str(decay),
            "SOLVER.EMA.WARMUP": "False",
        },
    )
    names = ["model_0000000", "model_0000001", "model_0000002", "model_final"]
    raw = [state(tmp_path, name)["model"] for name in names]
    found = [state(tmp_path, name)["ema"] for name in names]
    buffers = {key for key in raw[0] if "running_var" in key}
    assert buffers
    for key, first in raw[0].items():
        if first.is_floating_point():
            average = first.double()  # after the first step, timm's average starts
            torch.testing.assert_close(found[0][key], first, rtol=0, atol=0)
            for weights, expected in zip(raw[1:], found[1:], strict=True):
                average = decay * average + (1 - decay) * weights[key].double()
                torch.testing.assert_close(expected[key].double(), average, rtol=1e-5, atol=1e-7)
    exported, info = read_weights(str(tmp_path / "model_final.safetensors"))
    assert info is not None
    assert info.iteration == 3
    for key, value in exported.items():
        torch.testing.assert_close(value, found[-1][key], rtol=0, atol=0)
    assert any(not torch.equal(exported[key], raw[-1][key]) for key in buffers)


def test_the_average_is_what_is_evaluated_now_and_later(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    whole = Evaluation.__call__

    def note(self: Evaluation, model: torch.nn.Module) -> dict[str, Any]:
        seen.append({key: value.clone() for key, value in model.state_dict().items()})
        return whole(self, model)

    monkeypatch.setattr(Evaluation, "__call__", note)
    train_afresh(tmp_path, {**SOON, "SOLVER.EMA.ENABLED": "True", "SOLVER.EMA.DECAY": "0.9"})
    for weights in ("model_final.pth", "model_final.safetensors"):
        cfg = load_config(tmp_path / "config.yaml", ["MODEL.WEIGHTS", str(tmp_path / weights)])
        evaluate(cfg)
    assert len(seen) == 3
    average = state(tmp_path)["ema"]
    for evaluated in seen:
        for key, value in average.items():
            torch.testing.assert_close(evaluated[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("kept", [0, 2])
def test_the_newest_checkpoints_stay(train_afresh: TrainAfresh, tmp_path: Path, kept: int) -> None:
    train_afresh(tmp_path, {**SOON, "SOLVER.CHECKPOINTS_KEPT": str(kept)})
    names = sorted(path.name for path in tmp_path.glob("model_*.pth"))
    periodic = [f"model_{index:07d}.pth" for index in range(3)]
    assert names == [*periodic[-kept:], "model_final.pth"]
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


def with_scores(monkeypatch: pytest.MonkeyPatch, scores: list[float]) -> None:
    """Makes evaluations give these APs, one after another."""
    left = iter(scores)
    monkeypatch.setattr(
        Trainer, "evaluate", lambda self: {"bbox": {"AP": next(left), "AP-ring": math.nan}}
    )


def test_the_best_weights_are_kept_and_a_nan_is_never_the_best(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_scores(monkeypatch, [math.nan, 7.0, 5.0, 7.0])
    train_afresh(tmp_path, {**SOON, "TEST.EVAL_PERIOD": "1"})
    best, info = read_weights(str(tmp_path / "model_best.safetensors"))
    assert info is not None
    assert info.iteration == 1
    expected = state(tmp_path, "model_0000001")["model"]
    for key, value in best.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
    assert [entry["bbox/AP"] for entry in entries(tmp_path) if "bbox/AP" in entry] == [7, 5, 7]
    assert "NaN" not in (tmp_path / "metrics.json").read_text()  # which is no JSON


def test_a_resumed_run_remembers_what_was_best(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opts = {**SOON, "TEST.EVAL_PERIOD": "1", "SOLVER.LR_SCHEDULER_NAME": "WarmupMultiStepLR"}
    with_scores(monkeypatch, [9.0, 1.0])
    train_afresh(tmp_path, {**opts, "SOLVER.MAX_ITER": "2"})
    with_scores(monkeypatch, [8.0, 3.0])
    train_afresh(tmp_path, opts, "--resume")
    _, info = read_weights(str(tmp_path / "model_best.safetensors"))
    assert info is not None
    assert info.iteration == 0


def test_of_losses_the_lowest_is_the_best_and_another_metric_starts_anew(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([3.0, 1.0, 2.0, 0.5])
    monkeypatch.setattr(
        Trainer, "evaluate", lambda self: {"task": {"loss": next(left), "score": 0.0}}
    )
    opts = {**SOON, "TEST.EVAL_PERIOD": "1", "SOLVER.LR_SCHEDULER_NAME": "WarmupMultiStepLR"}
    train_afresh(tmp_path, {**opts, "TEST.BEST_METRIC": "task/loss", "SOLVER.MAX_ITER": "3"})
    _, info = read_weights(str(tmp_path / "model_best.safetensors"))
    assert info is not None
    assert info.iteration == 1
    # By the old metric 0 would not be above 1.
    train_afresh(tmp_path, {**opts, "TEST.BEST_METRIC": "task/score"}, "--resume")
    _, info = read_weights(str(tmp_path / "model_best.safetensors"))
    assert info is not None
    assert info.iteration == 3


def test_an_unknown_metric_calls_nothing_the_best(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_scores(monkeypatch, [1.0])
    train_afresh(tmp_path, {"SOLVER.MAX_ITER": "1", "TEST.BEST_METRIC": "segm/AP"})
    assert not (tmp_path / "model_best.safetensors").exists()


def test_an_evaluation_that_fails_does_not_lose_the_training(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Trainer) -> dict[str, Any]:
        raise UserError("image 'x' cannot be used")

    monkeypatch.setattr(Trainer, "evaluate", fail)
    with pytest.raises(UserError, match="image 'x'"):
        train_afresh(tmp_path, {"SOLVER.CHECKPOINT_PERIOD": "100", "TEST.EVAL_PERIOD": "3"})
    assert state(tmp_path, "model_0000002")["iteration"] == 2


def test_the_config_in_the_folder_and_in_the_weights_makes_the_same_run(
    train_afresh: TrainAfresh, tmp_path: Path
) -> None:
    opts = {
        "SOLVER.EPOCHS": "0.5",
        "SOLVER.WARMUP_EPOCHS": "0.1",
        "SOLVER.CHECKPOINT_EPOCHS": "0.3",
    }
    opts |= {"SOLVER.REFERENCE_BATCH_SIZE": "8", "SOLVER.LR_SCALING": "linear"}
    train_afresh(tmp_path, opts)
    cfg = load_config(tmp_path / "config.yaml")
    assert cfg.SOLVER.MAX_ITER == 3  # 0.5 x 12 images / 2
    assert cfg.SOLVER.CHECKPOINT_PERIOD == 2
    assert cfg.SOLVER.BASE_LR == pytest.approx(0.002 * 2 / 8)
    _, info = read_weights(str(tmp_path / "model_final.safetensors"))
    assert info is not None
    assert yaml.safe_load(info.config) == yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert info.class_names == tuple(cfg.MODEL.CLASS_NAMES)
    assert info.pixel_format == "RGB"


def test_weights_alone_make_the_model_again(train_afresh: TrainAfresh, tmp_path: Path) -> None:
    train_afresh(tmp_path, {"SOLVER.MAX_ITER": "1"})
    weights, info = read_weights(str(tmp_path / "model_final.safetensors"))
    assert info is not None
    (tmp_path / "alone.yaml").write_text(info.config)
    model = build_model(load_config(tmp_path / "alone.yaml"))
    assert not any(model.load_state_dict(weights))


def test_a_loss_that_is_not_finite_leaves_a_file_and_a_sentence(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_step = StepTrainer.run_step

    def poison(self: StepTrainer) -> None:
        if self.iter == 1:
            next(self.model.parameters()).data[:] = math.nan
        run_step(self)

    monkeypatch.setattr(StepTrainer, "run_step", poison)
    with pytest.raises(UserError, match=r"not finite at iteration 1 .*--replay"):
        train_afresh(tmp_path, {})
    assert (tmp_path / "failure_0000001_rank0.pt").is_file()


def test_the_end_of_a_run_does_not_hide_why_it_ended(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Trainer, name: str) -> None:
        raise UserError("cannot write")

    monkeypatch.setattr(Trainer, "save", fail)
    with pytest.raises(UserError, match="cannot write"):  # just after the first line of the log
        train_afresh(tmp_path, {"SOLVER.CHECKPOINT_PERIOD": "1"})
    assert [entry["iteration"] for entry in entries(tmp_path)] == [0]


@pytest.mark.parametrize(
    ("opts", "sentence"),
    [
        ({"MODEL.DEVICE": "gpu"}, "MODEL.DEVICE is 'gpu'"),
        ({"INPUT.MIN_SIZE_TRAIN": "()"}, "INPUT.MIN_SIZE_TRAIN"),
        ({"INPUT.FORMAT": "XYZ"}, "INPUT.FORMAT is 'XYZ'"),
        ({"SOLVER.WEIGHT_DECAY": "-0.1"}, "SOLVER.WEIGHT_DECAY must be at least 0"),
        ({"TEST.PRECISE_BN.ENABLED": "True"}, "PRECISE_BN"),
        ({"SOLVER.AMP.ENABLED": "True", "SOLVER.AMP.PRECISION": "half"}, "PRECISION is 'half'"),
        ({"SOLVER.EMA.ENABLED": "True", "SOLVER.EMA.DECAY": "1.0"}, "SOLVER.EMA.DECAY"),
        ({"SOLVER.ACCUMULATE": "3"}, "SOLVER.ACCUMULATE is 3"),
        ({"SOLVER.ACCUMULATE": "0"}, "SOLVER.ACCUMULATE must be at least 1"),
        ({"SOLVER.LOG_PERIOD": "0"}, "SOLVER.LOG_PERIOD must be at least 1"),
        ({"SOLVER.CHECKPOINTS_KEPT": "-1"}, "SOLVER.CHECKPOINTS_KEPT must be at least 0"),
        ({"DATALOADER.NUM_WORKERS": "-1"}, "DATALOADER.NUM_WORKERS must be at least 0"),
        ({"SOLVER.IMS_PER_BATCH": "0"}, "IMS_PER_BATCH"),
        ({"MODEL.RETINANET.NUM_CLASSES": "9"}, "the data have 6 classes"),
        ({"DATASETS.TRAIN": "('qbheat_toy_train',)"}, "both name data"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_a_sentence(
    train_afresh: TrainAfresh, tmp_path: Path, opts: dict[str, str], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        train_afresh(tmp_path, opts)
    assert not list(tmp_path.glob("*.pth"))


def test_the_end_of_a_run_whose_last_evaluation_failed_is_made_up(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Trainer) -> dict[str, Any]:
        raise UserError("image 'x' cannot be used")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", fail)
        with pytest.raises(UserError, match="image 'x'"):
            train_afresh(tmp_path, {"SOLVER.MAX_ITER": "2"})
    assert not (tmp_path / "model_final.pth").exists()
    with_scores(monkeypatch, [4.0])
    train_afresh(tmp_path, {"SOLVER.MAX_ITER": "2"}, "--resume")
    assert state(tmp_path)["iteration"] == 1
    assert (tmp_path / "model_final.safetensors").is_file()
    assert (tmp_path / "model_best.safetensors").is_file()
    assert [entry["bbox/AP"] for entry in entries(tmp_path) if "bbox/AP" in entry] == [4]


def test_checkpoints_from_before_a_resumption_further_back_do_not_push_out_new_ones(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_afresh(tmp_path, {**SOON, "SOLVER.MAX_ITER": "4"})
    (tmp_path / "last_checkpoint").write_text("model_0000000.pth")
    (tmp_path / "model_final.pth").unlink()
    opts = {**SOON, "SOLVER.MAX_ITER": "4", "SOLVER.CHECKPOINTS_KEPT": "1"}
    run_step = StepTrainer.run_step

    def stop(self: StepTrainer) -> None:
        if self.iter == 2:
            raise KeyboardInterrupt
        run_step(self)

    monkeypatch.setattr(StepTrainer, "run_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train_afresh(tmp_path, opts, "--resume")
    assert [path.name for path in tmp_path.glob("model_*.pth")] == ["model_0000001.pth"]

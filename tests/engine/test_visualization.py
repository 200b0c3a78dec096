# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures during training: when, and without changing the run."""

import logging
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from detectron2.utils.events import EventStorage
from torch import nn

from qbheat_det.core.figures import Figure, Image, NotApplicable
from qbheat_det.data import register_image_folders
from qbheat_det.engine import visualization
from qbheat_det.engine.visualization import VisualizationHook

from .tiny_pretraining import make_folder, train
from .tiny_training import losses, state


def make_run(folder: Path, max_iter: int) -> Any:
    """What the hook sees of a trainer."""
    return SimpleNamespace(
        iter=0, start_iter=0, max_iter=max_iter, storage=EventStorage(0),
        cfg=SimpleNamespace(OUTPUT_DIR=str(folder)),
        evaluated_model=nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval()),
    )  # fmt: skip


def take_steps(hook: VisualizationHook, run: Any, *, start: int = 0, end: int = 0) -> None:
    hook.trainer, run.start_iter = run, start
    hook.before_train()
    for iteration in range(start, end or run.max_iter):
        run.iter = iteration
        hook.after_step()


@pytest.mark.parametrize(
    ("period", "max_iter", "expected"), [(3, 8, [0, 3, 6, 8]), (0, 100, list(range(0, 101, 10)))]
)
def test_figures_are_drawn_in_their_period_and_at_both_ends(
    tmp_path: Path, period: int, max_iter: int, expected: list[int]
) -> None:
    whole = VisualizationHook({"any": lambda _: Figure("any", "")}, period=period)
    take_steps(whole, make_run(tmp_path / "whole", max_iter))
    names = [f"any_{step:07d}.json" for step in expected]
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == names

    # A resumed run draws what the whole run would have drawn.
    half, run = 2 * max_iter // 3, make_run(tmp_path / "resumed", max_iter)
    for start, end in ((0, half), (half, max_iter)):
        take_steps(whole, run, start=start, end=end)
    assert sorted(path.name for path in (tmp_path / "resumed").rglob("*.json")) == names


def test_an_error_is_logged_once_and_a_figure_that_does_not_apply_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def fail(_: nn.Module) -> Figure:
        raise OSError("no space left on device")

    def refuse(_: nn.Module) -> Figure:
        asked.append("other model")
        raise NotApplicable("no such part")

    hook = VisualizationHook({"full disk": fail, "other model": refuse}, period=2)
    run = make_run(tmp_path, 4)
    with caplog.at_level(logging.INFO, logger="qbheat_det"):
        take_steps(hook, run)
    assert asked == ["other model"]
    assert [r.levelname for r in caplog.records].count("ERROR") == 1
    assert run.evaluated_model.training


def test_figures_go_to_the_folder_the_log_and_tensorboard(tmp_path: Path) -> None:
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[..., 0] = 200  # red
    png = Image(cv2.imencode(".png", pixels[..., ::-1])[1].tobytes(), "image/png", "red")
    images = {"all": png, "svg": Image(b"<svg/>", "image/svg+xml", "")}
    figure = Figure("red", "Red", images=images, scalars={"a/b": 2.0, "a/c": math.nan})
    hook = VisualizationHook({"red": lambda _: figure}, period=1)
    hook.trainer = run = make_run(tmp_path, 12)
    run.iter = 11
    hook.after_step()
    names = {"red_0000012.json", "red_all_0000012.png", "red_svg_0000012.svg"}
    assert {path.name for path in (tmp_path / "visualizations").iterdir()} == names
    assert {name: value for name, (value, _) in run.storage.latest().items()} == {"a/b": 2.0}
    ((name, image, _),) = run.storage._vis_data
    assert name == "red/all"
    np.testing.assert_array_equal(image.transpose(1, 2, 0), pixels)


def test_a_run_with_figures_has_the_losses_and_weights_of_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw_noise(model: Any, load_images: Any, cfg: Any) -> Figure:
        outputs = model(load_images(cfg.VIS.NUM_IMAGES))  # of QB-Heat, from random corners
        mean = float(torch.stack([each["loss_reconstruction"] for each in outputs]).mean())
        return Figure("noise", "", scalars={"noise/loss": mean + 0 * random.random()})

    register_image_folders("seen", [make_folder(tmp_path / "data", 6)])
    opts = {"DATASETS.TRAIN": "('seen',)", "DATASETS.TEST": "()", "SOLVER.MAX_ITER": "2"}
    train(tmp_path / "without", opts)
    monkeypatch.setattr(visualization, "TRAINING_FIGURES", {"noise": draw_noise})
    shown = {"VIS.ENABLED": "True", "VIS.PERIOD": "1", "VIS.NUM_IMAGES": "2"}
    train(tmp_path / "with", {**opts, **shown})
    assert len(list((tmp_path / "with" / "visualizations").glob("noise_*.json"))) == 3
    assert not (tmp_path / "without" / "visualizations").exists()
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    expected, found = state(tmp_path / "without"), state(tmp_path / "with")
    torch.testing.assert_close(found["model"], expected["model"], rtol=0, atol=0)
    assert str(found["trainer"]["_trainer"]) == str(expected["trainer"]["_trainer"])

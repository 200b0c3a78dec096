# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Losses without a network: by hand, by a naive second way, and against QB-Heat's own."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from numpy.typing import NDArray
from PIL import Image

from qbheat_det.analysis import reconstruction_baselines
from qbheat_det.analysis.reconstruction_baselines import (
    BaselineReport,
    RidgeRegression,
    compute_baselines,
)
from qbheat_det.checkpoint import WeightsInfo, read_weights, save_weights
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_image_batches, load_image_folders, register_image_folders
from qbheat_det.evaluation import build_evaluator
from qbheat_det.modeling.pretrain import CORNERS, QUADRANTS
from tests.tool_modules import load_tool, refuse

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "quick_schedules" / "qb_heat_285M_toy.yaml")
SIZE, PATCH = 16, 4
QUARTERS = dict(zip(QUADRANTS, ((0, 0), (0, 8), (8, 0), (8, 8), (4, 4)), strict=True))

Pixels = NDArray[np.uint8]
Records = list[dict[str, Any]]


def make_config(*opts: str) -> CfgNode:
    """Images of 16 x 16 pixels, patches of 4 x 4, raw pixels and no flips unless told otherwise."""
    small = ["INPUT.PRETRAIN.SIZE", "16", "MODEL.QB_HEAT.IN_FEATURE", "s4"]
    small += ["MODEL.MOBILE_FORMER.OUT_FEATURES", "('s4',)", "INPUT.RANDOM_FLIP", "none"]
    small += ["MODEL.QB_HEAT.NORM_PIXEL_LOSS", "False", "MODEL.DEVICE", "cpu"]
    return load_config(CONFIG, [*small, *opts])


def write(folder: Path, images: Sequence[Pixels]) -> Records:
    folder.mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i:03}.png")
    return load_image_folders([folder])[0]


def draw(num: int, seed: int) -> list[Pixels]:
    """Smooth noise, so that there is something to predict."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (num, 4, 4, 3), dtype=np.uint8)
    fine = rng.integers(-20, 20, (num, SIZE, SIZE, 3))
    large = coarse.repeat(4, axis=1).repeat(4, axis=2)
    return list((large * 0.8 + 25 + fine).clip(0, 255).astype(np.uint8))


def normalise(cfg: CfgNode, image: Pixels) -> NDArray[np.float64]:
    return (image - np.array(cfg.MODEL.PIXEL_MEAN)) / np.array(cfg.MODEL.PIXEL_STD)


def is_masked(place: str) -> NDArray[np.bool_]:
    top, left = QUARTERS[place]
    masked = np.ones((SIZE, SIZE), dtype=bool)
    masked[top : top + 8, left : left + 8] = False
    return masked


def check_losses(
    report: BaselineReport, name: str, corner: Sequence[float], centre: Sequence[float]
) -> None:
    found = report.losses[name]
    expected = {"loss_corner": np.mean(corner), "loss_centre": np.mean(centre)}
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert found["loss"] == pytest.approx(np.mean(list(expected.values())), rel=1e-5)


def predict_naively(
    cfg: CfgNode, train: list[Pixels], image: Pixels, place: str, penalty: float
) -> NDArray[np.float64]:
    """Returns the loss of one regression for this place alone, pixels in the order of the image."""
    top, left = QUARTERS[place]
    pixels = np.stack([normalise(cfg, one) for one in [*train, image]])
    seen = pixels[:, top : top + 8, left : left + 8].reshape(len(pixels), -1)
    target = pixels[:, is_masked(place)].reshape(len(pixels), -1)
    x, y = seen[:-1], target[:-1]
    centred = x - x.mean(axis=0)
    extra = np.sqrt(penalty * (centred**2).sum() / x.shape[1]) * np.eye(x.shape[1])
    rows = np.concatenate([centred, extra])
    goals = np.concatenate([y - y.mean(axis=0), np.zeros((x.shape[1], y.shape[1]))])
    weight = np.linalg.lstsq(rows, goals, rcond=None)[0]
    error: NDArray[np.float64] = (seen[-1] - x.mean(axis=0)) @ weight + y.mean(axis=0) - target[-1]
    return error


@pytest.mark.parametrize("flip", ["none", "horizontal"])
def test_ridge_is_five_regressions_on_images_and_their_mirror_images(
    tmp_path: Path, flip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconstruction_baselines, "PENALTIES", (0.1,))
    images = draw(30, seed=0), draw(6, seed=1)
    train, val = write(tmp_path / "train", images[0]), write(tmp_path / "val", images[1])
    cfg = make_config("INPUT.RANDOM_FLIP", flip)
    report = compute_baselines(cfg, train, val)
    axis = {"none": [], "horizontal": [1]}[flip]
    rows = images[0] + [np.flip(image, axis) for image in images[0] if axis]
    assert len(report.penalties) == 5
    losses = [
        [
            float((predict_naively(cfg, rows, image, place, 0.1) ** 2).mean())
            for place in (CORNERS[i % 4], "centre")
        ]
        for i, image in enumerate(images[1])
    ]
    corner, centre = zip(*losses, strict=True)
    check_losses(report, "ridge", corner, centre)


def test_sets_and_configs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    train = write(tmp_path / "train", draw(2, seed=0))
    val = write(tmp_path / "val", draw(1, seed=1))
    with pytest.raises(UserError, match="two readable training images"):
        compute_baselines(make_config(), train[:1], val)
    with pytest.raises(UserError, match=r"000\.png"):
        compute_baselines(make_config(), train, train[:1])
    Path(val[0]["file_name"]).write_bytes(b"no image")
    with pytest.raises(UserError, match="held-out"):
        compute_baselines(make_config(), train, val)

    for key, value in (
        ("MODEL.META_ARCHITECTURE", "RetinaNet"),
        ("INPUT.PRETRAIN.SIZE", "20"),
        ("MODEL.QB_HEAT.LOSS_ON", "some"),
        ("INPUT.RANDOM_FLIP", "both"),
    ):
        with pytest.raises(UserError):
            compute_baselines(make_config(key, value), [], [])


def test_zero_of_normalised_patches_is_their_own_variance(tmp_path: Path) -> None:
    # A patch of 48 values, normalised by the variance with 47 in the denominator.
    board = (np.indices((SIZE, SIZE)).sum(axis=0) % 2 * 255).astype(np.uint8)
    board = np.repeat(board[..., None], 3, axis=2)
    train = write(tmp_path / "train", [board, board])
    val = write(tmp_path / "val", [board, 255 - board])
    grey = ["MODEL.PIXEL_MEAN", "[0., 0., 0.]", "MODEL.PIXEL_STD", "[255., 255., 255.]"]
    cfg = make_config("MODEL.QB_HEAT.NORM_PIXEL_LOSS", "True", *grey)
    report = compute_baselines(cfg, train, val)
    check_losses(report, "zero", [47 / 48], [47 / 48])
    # The mean image is the board: the first is met exactly, the other missed by twice its height.
    check_losses(report, "mean image", [0, 4 * 47 / 48], [0, 4 * 47 / 48])


def draw_rows(number: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x (N, 7) away from zero and of unequal scales, and noisy y (N, 3, 2)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 7, generator=generator) * torch.logspace(-1, 1, 7) + 5
    truth = torch.randn(7, 6, generator=torch.Generator().manual_seed(99))
    noise = torch.randn(number, 6, generator=generator) * 20
    return x, (x @ truth + noise + 3).view(number, 3, 2)


@pytest.mark.parametrize("number", [9, 60])
def test_the_penalty_chosen_has_the_least_error_on_the_rows_held_out(number: int) -> None:
    grid = [1e-4, 1e-2, 0.1, 1.0, 10.0, 1000.0]
    (x, y), (held_x, held_y) = draw_rows(number, seed=1), draw_rows(30, seed=2)

    def fit(penalty: float | None) -> tuple[RidgeRegression, list[float]]:
        """Fits all rows in two batches; with a penalty, those alone that choose none."""
        model = RidgeRegression(num_inputs=7, num_groups=3, group_size=2)
        model.add(x, y, torch.zeros(number, dtype=torch.bool))
        if penalty is None:
            model.add(held_x, held_y, torch.ones(30, dtype=torch.bool))
        return model, model.solve(grid if penalty is None else [penalty])

    errors = torch.stack([
        (fit(penalty)[0].predict(held_x) - held_y).square().sum(dim=(0, 2)) for penalty in grid
    ])  # fmt: skip
    chosen = fit(None)[1]
    assert chosen == [grid[i] for i in errors.argmin(dim=0)]
    assert {grid[0], grid[-1]} - set(chosen)  # a choice was to be made


TOOL = load_tool("reconstruction_baselines")

SMALL = ["INPUT.PRETRAIN.SIZE", "16", "MODEL.QB_HEAT.IN_FEATURE", "s4", "MODEL.DEVICE", "cpu"]
SMALL += ["MODEL.MOBILE_FORMER.OUT_FEATURES", "('s4',)"]


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Flags for six training images and five others."""
    rng = np.random.default_rng(0)
    for name, num in (("train", 6), ("val", 5)):
        (tmp_path / name).mkdir()
        for i in range(num):
            pixels = rng.integers(0, 256, (20, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    return ["--images", f"{tmp_path}/train", "--val-images", f"{tmp_path}/val"]


def save_model(path: Path, *opts: str, zero: bool = False) -> str:
    cfg = load_config(CONFIG, [*SMALL, *opts])
    model = build_model(cfg)
    if zero:
        torch.nn.init.zeros_(model.decoder.head.weight)
    info = WeightsInfo.from_config(cfg, iteration=1, commit="c0ffee", pretrain_only_modules=[])
    save_weights(str(path), model.state_dict(), info)
    return str(path)


def test_models_stand_beside_the_baselines_with_the_figures_of_evaluation(
    folders: list[str], tmp_path: Path
) -> None:
    zero = save_model(tmp_path / "zero.safetensors", zero=True)
    trained = save_model(tmp_path / "trained.safetensors")
    path = tmp_path / "made" / "figures.json"
    TOOL.main([*folders, "--weights", zero, "--weights", trained, "--json", str(path)])
    rows = json.loads(path.read_text())["losses"]
    assert list(rows) == ["zero", "mean image", "ridge", zero, trained]
    assert rows[zero] == pytest.approx(rows["zero"], rel=1e-5, abs=1e-6)
    cfg = load_config(CONFIG, SMALL)  # and as a run evaluates itself
    register_image_folders("held_out_of_a_test", [folders[3]])
    model = build_model(cfg).eval()
    model.load_state_dict(read_weights(trained)[0])
    evaluator = build_evaluator(cfg, "held_out_of_a_test")
    evaluator.reset()
    with torch.no_grad():
        for batch in build_image_batches(cfg, "held_out_of_a_test"):
            evaluator.process(batch, model(batch))
    assert rows[trained] == pytest.approx(evaluator.evaluate()["reconstruction"])


def test_wrong_input_is_exit_code_2_and_names_what_is_wrong(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = tmp_path / "one"
    one.mkdir()
    shutil.copy(tmp_path / "train" / "0.png", one)
    raw = save_model(tmp_path / "raw.safetensors", "MODEL.QB_HEAT.NORM_PIXEL_LOSS", "False")
    named = ["--config-file", CONFIG]
    val = folders[2:]
    for arguments, expected in (
        (folders, "--config-file"),
        ([*named, "--images", str(one), *val, *SMALL], "two readable training images"),
        ([*named, *folders, "--weights", raw, *SMALL], "NORM_PIXEL_LOSS"),
        ([*named, *folders, "--max-images", "1"], "--max-images"),
        (["--config-file", str(ROOT / "configs/demo/toy_retinanet.yaml"), *folders], "RetinaNet"),
    ):
        assert expected in refuse(TOOL.main, arguments, capsys)

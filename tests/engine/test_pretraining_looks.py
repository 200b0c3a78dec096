# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a run of pre-training shows of itself, and that this changes nothing of the run."""

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from detectron2.engine import TrainerBase
from detectron2.modeling import build_model
from detectron2.utils import comm
from torch import nn

from qbheat_det.analysis.reconstruction_views import to_rgb
from qbheat_det.config import get_cfg, get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.data import register_image_folders
from qbheat_det.engine import pretraining_looks
from qbheat_det.engine.looking import Look
from qbheat_det.engine.pretraining_looks import (
    FixedImages,
    LookAtCorrelation,
    LookAtReconstructions,
    LookAtSpectrum,
    build_looks,
)
from qbheat_det.modeling.pretrain import PretrainingModel
from tests.data.pictures import draw, save
from tests.modeling.tiny_pretraining import MEAN, STD, PatchesAsMap

from .conftest import forget_runs
from .processes import make_args, run_in_processes
from .tiny_pretraining import train
from .tiny_training import losses, make_data, state

SET = "images_that_are_looked_at"
DATA = {"DATASETS.TRAIN": f"('{SET}',)"}
SEEN = {**DATA, "VIS.ENABLED": "True", "VIS.PERIOD": "2", "VIS.NUM_IMAGES": "2"}


@pytest.fixture(scope="module", autouse=True)
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    register_image_folders(SET, [make_data(tmp_path_factory.mktemp("seen")) / "images"])
    yield
    forget_runs(SET)


@pytest.fixture(scope="module")
def seen_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was looked at after every second step, however long that took."""
    folder = tmp_path_factory.mktemp("seen_run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Look, "_run_seconds", lambda _: 1e9)
        train(folder, SEEN)
    return folder


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "looks").iterdir()}


def figures(folder: Path, name: str) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise ValueError(word)

    text = (folder / "looks" / name).read_text()
    return dict(json.loads(text, parse_constant=refuse))


def test_a_run_that_is_looked_at_has_the_same_losses_and_weights(
    tmp_path: Path, seen_run: Path
) -> None:
    forget_runs()
    train(tmp_path, DATA)
    assert not (tmp_path / "looks").exists()
    assert losses(tmp_path) == losses(seen_run)
    unseen, seen = state(tmp_path), state(seen_run)
    for name, tensor in unseen["model"].items():
        assert torch.equal(seen["model"][name], tensor), name
    assert str(unseen["trainer"]["_trainer"]) == str(seen["trainer"]["_trainer"])


def test_every_look_leaves_pictures_and_the_numbers_behind_them(seen_run: Path) -> None:
    expected = {
        f"{kind}_{steps:07d}{ending}"
        for steps in (0, 2, 4)
        for kind, endings in (
            ("correlation", [".json"]),
            ("reconstructions", [".json", ".png"]),
            ("spectrum", [".json", ".png", ".svg"]),
        )
        for ending in endings
    }
    assert files(seen_run) == expected
    for name in sorted(expected):
        if name.endswith(".json"):
            assert figures(seen_run, name)["steps"] == int(name[-12:-5])
    sheet = cv2.imread(str(seen_run / "looks" / "reconstructions_0000004.png"))
    assert sheet.shape[1] == 5 * 192 + 4 * 6  # 64 pixels, three times enlarged
    lines = (seen_run / "metrics.json").read_text().splitlines()
    known = {key for line in lines for key in json.loads(line)}
    assert {"correlation/mean", "reconstructions/corner", "reconstructions/centre"} <= known
    assert {"spectrum/corner/energy_ratio", "spectrum_control/cosines"} <= known


def test_before_training_the_spectrum_is_zero_and_afterwards_it_is_not(seen_run: Path) -> None:
    before, after = (figures(seen_run, f"spectrum_000000{steps}.json") for steps in (0, 4))
    for content in (before, before["control"]):
        for scale in content["scales"].values():
            assert {matrix["energy"] for matrix in scale["matrices"].values()} == {0.0}
        assert "scales/corner/energy_ratio" in content["left_out"]
    for content in (after, after["control"]):
        assert content["left_out"] == {}
        assert {scale["offset"] for scale in content["scales"].values()} == {0.5, 0.25}
        assert content["scales"]["centre"]["matrices"]["B2"]["energy"] > 0


def test_the_losses_of_the_pictures_are_those_of_their_images(seen_run: Path) -> None:
    content = figures(seen_run, "reconstructions_0000004.json")
    assert len(content["images"]) == 2
    assert [row["place"] for row in content["corner"]] == ["top_left", "top_right"]
    assert [row["place"] for row in content["centre"]] == ["centre", "centre"]
    mean = sum(row["loss"] for row in content["corner"]) / 2
    lines = (seen_run / "metrics.json").read_text().splitlines()
    curve = [json.loads(line).get("reconstructions/corner") for line in lines]
    assert curve[-1] == pytest.approx(mean)


def test_a_resumed_run_goes_on_looking(
    tmp_path: Path, seen_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Look, "_run_seconds", lambda _: 1e9)
    folder = tmp_path / "resumed"
    shutil.copytree(seen_run, folder)
    (folder / "model_final.pth").unlink()
    (folder / "last_checkpoint").write_text("model_0000001.pth")
    for kind in ("correlation", "reconstructions", "spectrum"):
        (folder / "looks" / f"{kind}_0000000.json").unlink()  # is not made again
        (folder / "looks" / f"{kind}_0000004.json").unlink()
    forget_runs()
    trainer = train(folder, {**SEEN, "VIS.PERIOD": "1"}, "--resume")
    again = files(folder) - files(seen_run)
    assert {name[-12:-5] for name in again if name.endswith(".json")} == {"0000003"}
    assert files(seen_run) - files(folder) == {
        f"{kind}_0000000.json" for kind in ("correlation", "reconstructions", "spectrum")
    }
    for name in ("spectrum_0000004.json", "correlation_0000004.json"):
        assert figures(folder, name) == figures(seen_run, name)
    # Two before the break, two after it.
    assert [hook.made for hook in trainer._hooks if isinstance(hook, Look)] == [4, 4, 4]


def test_a_look_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> bytes:
        raise UserError("the disk is full")

    monkeypatch.setattr(pretraining_looks, "plot_spectrum", fail)
    forget_runs()
    train(tmp_path, {**SEEN, "SOLVER.MAX_ITER": "1"})
    assert (tmp_path / "model_final.pth").is_file()
    log = (tmp_path / "log.txt").read_text()
    assert log.count("LookAtSpectrum failed after 0 steps") == log.count("Traceback") == 1
    assert "LookAtSpectrum: 2 made, 2 of them with an error" in log
    assert "reconstructions_0000001.png" in files(tmp_path)


class Unhurried(Look):
    """Takes longer than a step; the others wait for the main process."""

    def look(self) -> None:
        time.sleep(0.3)
        self.write(f"seen_by_{comm.get_rank()}_{self.steps}", b"")


def train_and_look(args: argparse.Namespace) -> float:
    """The job of one process: a training loop that sums over all processes at each step."""

    class Loop(TrainerBase):
        def __init__(self) -> None:
            super().__init__()
            self.cfg = argparse.Namespace(OUTPUT_DIR=args.folder)
            self.evaluated_model = nn.Linear(1, 1)
            self.total = 0.0

        def run_step(self) -> None:
            value = torch.ones(1)
            torch.distributed.all_reduce(value)
            self.total += float(value)

    loop = Loop()
    loop.register_hooks([Unhurried(period=2, share=1.0)])
    loop.train(0, 4)
    return loop.total


def test_the_main_process_looks_alone_and_the_others_wait(tmp_path: Path) -> None:
    args = make_args(folder=str(tmp_path))
    assert run_in_processes(train_and_look, args, tmp_path) == [8.0, 8.0]
    assert {"seen_by_0_0", "seen_by_0_4"} <= files(tmp_path)
    assert not [name for name in files(tmp_path) if name.startswith("seen_by_1")]


@pytest.mark.parametrize("broken", [False, True])
def test_fixed_images_are_spread_over_the_set_and_can_be_read(tmp_path: Path, broken: bool) -> None:
    name = "twelve_grey_images"
    for i in range(12):
        save(tmp_path / f"{i:02d}.png", draw(40, 40) * 0 + 20 * i)
    if broken:
        (tmp_path / "04.png").write_bytes(b"no image")
    register_image_folders(name, [tmp_path])
    cfg = get_cfg()
    cfg.INPUT.DATASET_MAPPER_NAME, cfg.INPUT.PRETRAIN.SIZE = "pretrain", 32
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("not_read",), (name,)
    try:
        images = FixedImages(cfg)
        shades = [int(entry["image"].float().mean().round()) for entry in images.load(3)]
        assert shades == [0, 100 if broken else 80, 160]
        assert len(images.load(64)) == (11 if broken else 12)
        assert images.load(3) is images.load(3)
    finally:
        forget_runs(name)


def test_pictures_are_red_where_images_are_red_in_either_order_of_channels() -> None:
    for pixel_format, red in (("RGB", 0), ("BGR", 2)):
        image = torch.zeros(3, 2, 2)
        image[red] = 9.0
        pixels = to_rgb(image, pixel_format)[0, 0]
        np.testing.assert_array_equal(pixels, np.array([9.0, 0.0, 0.0], dtype=np.float32))


def test_looks_are_those_that_a_models_parts_allow() -> None:
    cfg = get_cfg()
    model: Any = PretrainingModel(
        backbone=PatchesAsMap(),
        in_feature="map",
        head_in_features=["map"],
        image_size=32,
        pixel_mean=MEAN,
        pixel_std=STD,
    )
    assert [type(look) for look in build_looks(cfg, model)] == [LookAtCorrelation]
    model.predictor = nn.Module()
    model.predictor.scales = nn.ModuleDict({"corner": nn.Identity()})
    kinds = [LookAtSpectrum, LookAtCorrelation]
    assert [type(look) for look in build_looks(cfg, model)] == kinds
    model.views = {"corner": ("top_left",)}
    assert [type(look) for look in build_looks(cfg, model)] == [LookAtReconstructions, *kinds]
    cfg.VIS.ENABLED = False
    assert build_looks(cfg, model) == []


def test_what_is_not_pre_trained_is_not_looked_at() -> None:
    cfg = load_config(get_config_path("ImageNet-probing/linear_285M.yaml"))
    cfg.MODEL.DEVICE, cfg.VIS.ENABLED = "meta", True
    with torch.device("meta"):
        classifier = build_model(cfg)
    assert build_looks(cfg, classifier) == []
    assert build_looks(cfg, nn.Linear(1, 1)) == []


@pytest.mark.parametrize(("key", "value"), [("SHARE", 1.5), ("SHARE", -0.1), ("NUM_IMAGES", 0)])
def test_settings_that_make_no_sense_are_refused(key: str, value: float) -> None:
    cfg = get_cfg()
    cfg.VIS[key] = value
    with pytest.raises(UserError, match=rf"VIS\.{key} .* not {value}"):
        build_looks(cfg, nn.Linear(1, 1))

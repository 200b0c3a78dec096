# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The tool: its table, models beside the baselines, and what it says of bad input."""

import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from PIL import Image

from qbheat_det.checkpoint import WeightsInfo, read_weights, save_weights
from qbheat_det.config import load_config
from qbheat_det.data import build_image_batches, register_image_folders
from qbheat_det.evaluation import build_evaluator
from tests.tool_modules import load_tool

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "quick_schedules" / "qb_heat_285M_toy.yaml")
SMALL = ["INPUT.PRETRAIN.SIZE", "16", "MODEL.QB_HEAT.IN_FEATURE", "s4", "MODEL.DEVICE", "cpu"]
SMALL += ["MODEL.MOBILE_FORMER.OUT_FEATURES", "('s4',)"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("reconstruction_baselines")


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
    tool: ModuleType, folders: list[str], tmp_path: Path
) -> None:
    zero = save_model(tmp_path / "zero.safetensors", zero=True)
    trained = save_model(tmp_path / "trained.safetensors")
    path = tmp_path / "made" / "figures.json"
    tool.main([*folders, "--weights", zero, "--weights", trained, "--json", str(path)])
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
    tool: ModuleType, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
        with pytest.raises(SystemExit) as stopped:
            tool.main(arguments)
        assert stopped.value.code == 2
        assert expected in capsys.readouterr().err

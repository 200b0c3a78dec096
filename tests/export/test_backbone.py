# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/export_backbone.py: what the file holds, and that every config starts from it."""

from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from PIL import Image
from torch import Tensor

from qbheat_det.checkpoint import SafeCheckpointer, WeightsInfo, read_weights, save_weights
from tests.engine.gradient_cases import MF_DETR, RETINANET, on_timm
from tests.tool_modules import load_tool, refuse

main = load_tool("export_backbone").main


def _train(cfg: CfgNode, folder: Path) -> dict[str, Tensor]:
    """Writes the weights that a training run writes; returns the backbone's state."""
    cfg.MODEL.CLASS_NAMES, cfg.MODEL.CATEGORY_IDS = ["cat", "dog", "bird"], [1, 2, 3]
    cfg.INPUT.FORMAT, cfg.INPUT.MIN_SIZE_TEST = "RGB", 64
    cfg.DATALOADER.NUM_WORKERS = 0
    model = build_model(cfg)
    info = WeightsInfo.from_config(cfg, iteration=7, commit="c0ffee", pretrain_only_modules=["x"])
    save_weights(str(folder / "run.safetensors"), model.state_dict(), info)
    backbone = getattr(model.backbone, "bottom_up", model.backbone)
    return {key: value.clone() for key, value in backbone.state_dict().items()}


def _words(folder: Path, *more: str) -> list[str]:
    words = ["--weights", f"{folder}/run.safetensors", "--output", f"{folder}/b.safetensors"]
    return [*words, *more]


def test_the_file_holds_the_backbone_alone_and_fills_that_of_any_config(tmp_path: Path) -> None:
    expected = _train(on_timm(RETINANET, "resnet18"), tmp_path)
    main(_words(tmp_path))
    state, info = read_weights(f"{tmp_path}/b.safetensors")
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    assert (info.class_names, info.category_ids, info.pretrain_only_modules) == ((), (), ())
    assert (info.iteration, info.commit, info.pixel_format) == (7, "c0ffee", "RGB")
    for other in (MF_DETR, RETINANET):
        checkpointer = SafeCheckpointer(build_model(on_timm(other, "resnet18")))
        checkpointer.load(f"{tmp_path}/b.safetensors")
        assert checkpointer.report.groups["backbone"].is_full
        assert checkpointer.report.unexpected == ()


def test_batch_norm_is_recalibrated_on_whole_images_and_all_else_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images").mkdir()
    for index in range(6):
        pixels = torch.randint(0, 256, (64 + 32 * (index % 2), 64, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / "images" / f"{index}.png")
    before = _train(on_timm(RETINANET, "resnet18"), tmp_path)
    folder = ["--images", f"{tmp_path}/images", "MODEL.DEVICE", "cpu"]
    main(_words(tmp_path, "--recalibrate-bn", "6", *folder))
    state, _ = read_weights(f"{tmp_path}/b.safetensors")
    assert state.keys() == before.keys()
    for key, value in state.items():
        if "running" in key:
            assert not torch.equal(value, before[key]), key
        elif "num_batches" not in key:
            torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    assert "--overwrite" in refuse(main, _words(tmp_path), capsys)


def test_invalid_input_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"stem.weight": torch.zeros(1)}, "bare.pth")
    for weights, output, more, named in (
        ("none.pth", "b.safetensors", [], "none.pth"),
        ("bare.pth", "b.safetensors", [], "bare.pth"),
        ("bare.pth", "b.pth", [], "b.pth"),
        ("x", "b.safetensors", ["--recalibrate-bn", "0"], "recalibrate"),
        ("x", "b.safetensors", ["--images", "."], "recalibrate"),
    ):
        assert named in refuse(main, ["--weights", weights, "--output", output, *more], capsys)
        assert not Path("b.safetensors").exists()

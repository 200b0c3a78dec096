# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The bare backbone as a file: what is in it, and that every config starts from it."""

from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_backbone, build_model
from PIL import Image
from torch import Tensor

from qbheat_det.checkpoint import SafeCheckpointer, WeightsInfo, read_weights, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.engine.backbone_export import export_backbone
from tests.modeling.backbone.timm_models import make_mf_detr_config, make_retinanet_config
from tests.tool_modules import load_tool

main = load_tool("export_backbone").main


def _train(cfg: CfgNode, path: Path) -> dict[str, Tensor]:
    """Writes what a training run leaves behind; returns the backbone's state."""
    cfg.MODEL.CLASS_NAMES = ["cat", "dog", "bird"]
    cfg.MODEL.CATEGORY_IDS = [1, 2, 3]
    cfg.INPUT.FORMAT = "RGB"
    cfg.INPUT.MIN_SIZE_TEST = 64
    cfg.DATALOADER.NUM_WORKERS = 0
    model = build_model(cfg)
    info = WeightsInfo.from_config(
        cfg, iteration=7, commit="c0ffee", pretrain_only_modules=["decoder"]
    )
    save_weights(str(path), model.state_dict(), info)
    backbone = getattr(model.backbone, "bottom_up", model.backbone)
    return {key: value.clone() for key, value in backbone.state_dict().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six images of two sizes."""
    (tmp_path / "images").mkdir()
    for index in range(6):
        pixels = torch.randint(0, 256, (64 + 32 * (index % 2), 64, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / "images" / f"{index}.png")
    return tmp_path / "images"


@pytest.mark.parametrize("make_config", [make_mf_detr_config, make_retinanet_config])
def test_the_file_holds_the_backbone_alone_and_fills_that_of_any_config(
    tmp_path: Path, make_config: object
) -> None:
    assert callable(make_config)
    cfg = make_config("resnet18")
    cfg.MODEL.FPN.IN_FEATURES, cfg.MODEL.FPN.TOP_LEVELS = ["s8", "s16"], 3
    expected = _train(cfg, tmp_path / "run.safetensors")
    main(["--weights", f"{tmp_path}/run.safetensors", "--output", f"{tmp_path}/b.safetensors"])
    state, info = read_weights(f"{tmp_path}/b.safetensors")
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    assert info is not None
    assert (info.class_names, info.category_ids, info.pretrain_only_modules) == ((), (), ())
    assert (info.iteration, info.commit, info.pixel_format) == (7, "c0ffee", "RGB")
    assert "timm:resnet18" in info.config
    for other in (make_mf_detr_config, make_retinanet_config):
        target = other("resnet18")
        target.MODEL.FPN.IN_FEATURES, target.MODEL.FPN.TOP_LEVELS = ["s8", "s16"], 3
        checkpointer = SafeCheckpointer(build_model(target))
        checkpointer.load(f"{tmp_path}/b.safetensors")
        assert checkpointer.report is not None
        assert checkpointer.report.groups["backbone"].is_full
        assert checkpointer.report.unexpected == ()


def test_statistics_come_from_whole_images_and_all_else_from_the_run(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _train(make_retinanet_config("resnet18"), tmp_path / "run.safetensors")
    words = ["--weights", f"{tmp_path}/run.safetensors", "--output", f"{tmp_path}/b.safetensors"]
    main([*words, "--recalibrate-bn", "6", "--image-folder", str(folder), "MODEL.DEVICE", "cpu"])
    assert "statistics from 6 images" in capsys.readouterr().out
    state, _ = read_weights(f"{tmp_path}/b.safetensors")
    assert state.keys() == before.keys()
    for key, value in state.items():
        if "running" in key:
            assert not torch.equal(value, before[key]), key
        elif "num_batches" not in key:
            torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_a_backbone_without_batch_norm_is_not_recalibrated(tmp_path: Path, folder: Path) -> None:
    _train(make_mf_detr_config("convnext_atto"), tmp_path / "run.safetensors")
    with pytest.raises(UserError, match="no BatchNorm"):
        export_backbone(
            f"{tmp_path}/run.safetensors",
            tmp_path / "b.safetensors",
            num_images=2,
            image_folders=[str(folder)],
        )
    assert not (tmp_path / "b.safetensors").exists()


def test_files_that_exist_are_kept_unless_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = _train(make_mf_detr_config("resnet18"), tmp_path / "run.safetensors")
    (tmp_path / "b.safetensors").write_text("mine")
    words = ["--weights", f"{tmp_path}/run.safetensors", "--output", f"{tmp_path}/b.safetensors"]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "exists: name another file, or ask for it with --overwrite" in capsys.readouterr().err
    assert (tmp_path / "b.safetensors").read_text() == "mine"
    main([*words, "--overwrite"])
    assert read_weights(f"{tmp_path}/b.safetensors")[0].keys() == expected.keys()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--weights", "none.pth", "--output", "b.safetensors"], "'none.pth' does not exist"),
        (["--weights", "bare.pth", "--output", "b.safetensors"], "no tensors named 'backbone."),
        (["--weights", "bare.pth", "--output", "b.pth"], "must end in .safetensors"),
        (["--weights", "bare.pth", "--output", "."], "must end in .safetensors"),
        (
            ["--weights", "bare.pth", "--output", "b.safetensors", "--recalibrate-bn", "0"],
            "--recalibrate-bn is a number of images, not 0",
        ),
        (
            ["--weights", "bare.pth", "--output", "b.safetensors", "--image-folder", "."],
            "only used to estimate",
        ),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    backbone = build_backbone(make_mf_detr_config("convnext_atto"))
    torch.save(backbone.state_dict(), "bare.pth")
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1

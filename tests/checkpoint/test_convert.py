# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Others' weights for the encoders here: equal outputs after the change of names, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from detectron2.modeling import build_backbone
from safetensors.torch import save_file
from torch import Tensor, nn

from qbheat_det.checkpoint import SafeCheckpointer, read_weights
from qbheat_det.checkpoint.convert import RESNETS, convert_weights, find_target, torchvision_name
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import TimmBackbone
from qbheat_det.modeling.classification import TimmMobileFormer
from tests.modeling.classification.test_timm_mobile_former import TINY
from tests.tool_modules import load_tool


class _Model(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone


def _trained(model: nn.Module) -> nn.Module:
    for name, tensor in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            tensor.zero_()
        elif tensor.ndim == 1:  # as after training
            tensor.uniform_(0.5, 1.5)
        else:
            tensor.uniform_(-1, 1).mul_(tensor[0].numel() ** -0.5)
    return model.eval()


@pytest.fixture(scope="module")
def resnet18(tmp_path_factory: pytest.TempPathFactory) -> str:
    """torchvision's, in a file."""
    net = torchvision.models.resnet18()
    return _save(net, tmp_path_factory.mktemp("resnet18") / "theirs.safetensors")


def _save(model: nn.Module, path: Path, prefix: str = "") -> str:
    save_file({prefix + key: value for key, value in model.state_dict().items()}, path)
    return str(path)


def _stages(net: Any, x: Tensor) -> list[Tensor]:
    x = net.maxpool(net.relu(net.bn1(net.conv1(x))))
    maps = []
    for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
        x = stage(x)
        maps.append(x)
    return maps


def test_detectron2s_resnet_gives_what_torchvisions_gives(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = torchvision.models.resnet50()
    net = _trained(net.to_empty(device="cpu"))
    weights = tmp_path / "theirs.pth"
    torch.save({"state_dict": {f"module.{k}": v for k, v in net.state_dict().items()}}, weights)
    output = tmp_path / "ours.safetensors"
    done = convert_weights(str(weights), output, "detectron2:resnet50")
    assert done.report is not None
    assert [key.removeprefix("module.") for key in done.report.unused] == ["fc.weight", "fc.bias"]
    cfg = get_cfg()
    for key, value in done.keys.items():
        cfg.merge_from_list([key, list(value) if isinstance(value, tuple) else value])
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]  # NORM is FrozenBN
    with torch.device("meta"):
        backbone = build_backbone(cfg)
    model = _Model(backbone.to_empty(device="cpu"))
    checkpointer = SafeCheckpointer(model)
    checkpointer.load(str(output))
    assert checkpointer.report is not None
    assert checkpointer.report.groups["backbone"].is_full
    assert not checkpointer.report.unexpected
    x = torch.randn(1, 3, 48, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = _stages(net.double(), x)
        found = model.double().eval().backbone(x)
    torch.testing.assert_close([*found.values()], expected)


@pytest.mark.parametrize("name", ["resnext50_32x4d", "wide_resnet50_2", "resnet34"])
def test_other_resnets_have_the_same_tensors(name: str) -> None:
    with torch.device("meta"):
        expected = getattr(torchvision.models, name)().state_dict()
        target = find_target(f"detectron2:{name}")
    found = {torchvision_name(k): v.shape for k, v in target.encoder.state_dict().items()}
    whole = {key: value.shape for key, value in expected.items()}
    assert found == {key: shape for key, shape in whole.items() if not key.startswith("fc.")}
    assert set(RESNETS) <= set(torchvision.models.list_models())


def test_a_timm_encoder_takes_timms_own_with_the_normalisation_of_the_tag(tmp_path: Path) -> None:
    name = "mobilenetv3_small_050"
    net = _trained(timm.create_model(name))
    output = tmp_path / "ours.safetensors"
    done = convert_weights(_save(net, tmp_path / "theirs.safetensors"), output, f"timm:{name}")
    cfg = timm.get_pretrained_cfg(name)
    assert done.keys["MODEL.PIXEL_MEAN"] == pytest.approx([255 * value for value in cfg.mean])
    assert done.report is not None
    assert all(key.startswith(("conv_head.", "classifier.")) for key in done.report.unused)
    backbone = TimmBackbone(name=name, out_features=["s8", "s32"])
    checkpointer = SafeCheckpointer(_Model(backbone))
    checkpointer.load(str(output))
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        maps = net.forward_intermediates(x, [2, 4], intermediates_only=True)
        torch.testing.assert_close([*backbone.eval()(x).values()], maps)


@pytest.mark.parametrize(
    ("to", "named"),
    [
        ("detectron2:resnet34", "detectron2:resnet34: 80 missing"),
        ("timm:resnet26", "timm:resnet26"),
        ("detectron2:resnet20", "resnet20"),
        ("timm:resnet19", "resnet19"),
        ("timm:resnet18.no_such_tag", "no_such_tag"),
        ("resnet18", "resnet18"),
        ("MobileFormer", r"theirs\.safetensors"),
        ("timm", r"theirs\.safetensors"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, resnet18: str, to: str, named: str) -> None:
    output = tmp_path / "ours.safetensors"
    with pytest.raises(UserError, match=named):
        convert_weights(resnet18, output, to)
    assert not output.exists()


def test_half_a_file_and_a_mean_of_unit_images_are_refused(tmp_path: Path, resnet18: str) -> None:
    state = read_weights(resnet18)[0]
    path, output = tmp_path / "half.safetensors", tmp_path / "ours.safetensors"
    save_file({key: value for key, value in state.items() if "layer4" not in key}, path)
    for target, mean, named in (
        (output, (), "layer4"),
        (output, (0.485, 0.456, 0.406), "--pixel-mean"),
        (tmp_path / "ours.pth", (), r"ours\.pth"),
        (path, (), "--overwrite"),
    ):
        with pytest.raises(UserError, match=named):
            convert_weights(str(path), target, "detectron2:resnet18", pixel_mean=mean)


def test_mobile_formers_go_to_timms_names_and_back(tmp_path: Path) -> None:
    net = TimmMobileFormer(arch=TINY, num_classes=5)
    theirs = _save(net, tmp_path / "theirs.safetensors", "module.")
    ours, again = tmp_path / "ours.safetensors", tmp_path / "again.safetensors"
    convert_weights(theirs, ours, "MobileFormer")
    state = read_weights(str(ours))[0]
    assert {name.partition(".")[0] for name in state} == {"backbone", "decoder"}
    assert {"backbone.tokens", "decoder.classifier.weight"} <= set(state)
    convert_weights(str(ours), again, "timm")
    torch.testing.assert_close(read_weights(str(again))[0], dict(net.state_dict()), rtol=0, atol=0)


def test_a_timm_encoder_in_a_detector_goes_back_to_timm(tmp_path: Path) -> None:
    name = "mobilenetv3_small_050"
    detector = _Model(TimmBackbone(name=name, out_features=["s32"]))
    _save(detector, tmp_path / "detector.safetensors")
    path = tmp_path / "timm.safetensors"
    convert_weights(str(tmp_path / "detector.safetensors"), path, "timm")
    model = timm.create_model(name, features_only=True, feature_cls="getter", out_indices=[4])
    model.model.load_state_dict(read_weights(str(path))[0])
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        (expected,) = model.eval()(x)
        torch.testing.assert_close(detector.eval().backbone(x)["s32"], expected, rtol=0, atol=0)


def test_the_tool_prints_the_report_and_the_keys(
    tmp_path: Path, resnet18: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "ours.safetensors"
    arguments = ["--weights", resnet18, "--to", "detectron2:resnet18", "--output", str(output)]
    tool = load_tool("convert_weights")
    tool.main(arguments)
    printed = capsys.readouterr().out
    for words in (
        *("24/24 layer1 tensors", "2 not used (fc.bias, fc.weight)", f"{output}: 120 tensors"),
        *("MODEL.RESNETS.DEPTH 18", 'MODEL.PIXEL_MEAN "[123.675, 116.28, 103.53]"'),
    ):
        assert words in printed
    with pytest.raises(SystemExit, match="2"):
        tool.main(arguments)
    assert "--overwrite" in capsys.readouterr().err

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Others' weights for the encoders here: equal outputs after the change of names, and refusals."""

from pathlib import Path

import pytest
import timm
import torch
import torchvision
from detectron2.modeling import build_backbone
from safetensors.torch import save_file
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

from qbheat_det.checkpoint import SafeCheckpointer, read_weights
from qbheat_det.checkpoint.convert import (
    RESNETS,
    build_resnet,
    convert_weights,
    torchvision_name,
)
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from tests.tool_modules import load_tool

TOOL = load_tool("convert_weights")


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


def test_detectron2s_resnet_gives_what_torchvisions_gives(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = torchvision.models.resnet50()
    net = _trained(net.to_empty(device="cpu"))
    weights = tmp_path / "theirs.pth"
    torch.save({"state_dict": {f"module.{k}": v for k, v in net.state_dict().items()}}, weights)
    output = tmp_path / "ours.safetensors"
    account, keys = convert_weights(str(weights), output, "detectron2:resnet50")
    assert "2 not used" in account
    cfg = get_cfg()
    for key, value in keys.items():
        cfg.merge_from_list([key, value])
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
        nodes = {f"layer{i}": f"res{i + 1}" for i in range(1, 5)}
        expected = create_feature_extractor(net.double(), nodes)(x)
        torch.testing.assert_close(model.double().eval().backbone(x), expected)


@pytest.mark.parametrize("name", ["resnext50_32x4d", "resnet34"])
def test_other_resnets_have_the_same_tensors(name: str) -> None:
    with torch.device("meta"):
        expected = getattr(torchvision.models, name)().state_dict()
        encoder, _ = build_resnet(name)
    found = {torchvision_name(k): v.shape for k, v in encoder.state_dict().items()}
    whole = {key: value.shape for key, value in expected.items()}
    assert found == {key: shape for key, shape in whole.items() if not key.startswith("fc.")}
    assert set(RESNETS) <= set(torchvision.models.list_models())


def test_efficientnet_lites_tensors_are_timms_in_their_order(tmp_path: Path) -> None:
    own = timm.create_model("tf_efficientnet_lite0").state_dict()
    theirs = {("_conv_stem.weight", f"_bn{i}")[i > 0]: v for i, v in enumerate(own.values())}
    torch.save(theirs, tmp_path / "theirs.pth")
    output = tmp_path / "ours.safetensors"
    convert_weights(str(tmp_path / "theirs.pth"), output, "timm:tf_efficientnet_lite0")
    found, info = read_weights(str(output))
    assert len(own) - len(found) == 8  # the last convolution and the classifier
    expected = {name: own[name.removeprefix("net.")] for name in found}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert info is not None
    assert (info.pixel_mean, info.pixel_std) == ((127.0,) * 3, (128.0,) * 3)
    weights, other = str(tmp_path / "theirs.pth"), "timm:tf_efficientnet_lite1"
    with pytest.raises(UserError, match="tf_efficientnet_lite1"):
        convert_weights(weights, tmp_path / "other.safetensors", other)


def test_what_does_not_fit_is_refused(tmp_path: Path, resnet18: str) -> None:
    state = read_weights(resnet18)[0]
    half, output = str(tmp_path / "half.safetensors"), tmp_path / "ours.safetensors"
    save_file({key: value for key, value in state.items() if "layer4" not in key}, half)
    own, mean = "detectron2:resnet18", (0.485, 0.456, 0.406)
    for weights, target, to, pixel_mean, named in (
        (resnet18, output, "detectron2:resnet34", (), "detectron2:resnet34: 80 missing"),
        (resnet18, output, "detectron2:resnet20", (), "resnet20"),
        (resnet18, output, "resnet18", (), "resnet18"),
        (resnet18, output, "MobileFormer", (), r"theirs\.safetensors"),
        (resnet18, output, "timm:tf_efficientnet_lite0", (), "tf_efficientnet_lite0"),
        (resnet18, output, "timm:efficientnet_lite0", (), "timm:efficientnet_lite0"),
        (half, output, own, (), "layer4"),
        (resnet18, output, own, mean, "--pixel-mean"),
        (resnet18, tmp_path / "ours.pth", own, (), r"ours\.pth"),
        (resnet18, Path(half), own, (), "--overwrite"),
    ):
        with pytest.raises(UserError, match=named):
            convert_weights(weights, target, to, pixel_mean=pixel_mean)
    assert not output.exists()


def test_the_tool_prints_the_report_and_the_keys(
    tmp_path: Path, resnet18: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "ours.safetensors"
    arguments = ["--weights", resnet18, "--to", "detectron2:resnet18", "--output", str(output)]
    TOOL.main(arguments)
    printed = capsys.readouterr().out
    for words in (
        *("24/24 layer1 tensors", "2 not used (fc.bias, fc.weight)"),
        *("MODEL.RESNETS.DEPTH 18", 'MODEL.PIXEL_MEAN "[123.675, 116.28, 103.53]"'),
    ):
        assert words in printed
    with pytest.raises(SystemExit, match="2"):
        TOOL.main(arguments)
    assert "--overwrite" in capsys.readouterr().err

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Others' weights for the encoders here: equal outputs after the change of names, and refusals."""

import functools
import zlib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import qbheat_det
from qbheat_det.checkpoint import SafeCheckpointer, read_weights
from qbheat_det.checkpoint.convert import convert_official, convert_weights, find_size
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer
from tests.tool_modules import load_tool, refuse

# Blocks as the authors list them: first expansion, width, stride, second expansion (0: no tokens).
_ROWS = {
    "508M": "2 24 1 0, 6 40 2 4, 3 40 1 3, 6 72 2 4, 3 72 1 3, 6 128 2 4, 4 128 1 4, 6 176 1 4,"
    "6 176 1 4, 6 240 2 4, 6 240 1 4, 6 240 1 4",
    "294M": "2 16 1 0, 6 24 2 4, 4 24 1 4, 6 48 2 4, 4 48 1 4, 6 96 2 4, 4 96 1 4, 6 128 1 4,"
    "6 128 1 4, 6 192 2 4, 6 192 1 4, 6 192 1 4",
    "214M": "2 12 1 0, 6 20 2 4, 3 20 1 4, 6 40 2 4, 4 40 1 4, 6 80 2 4, 4 80 1 4, 6 112 1 4,"
    "6 112 1 4, 6 160 2 4, 6 160 1 4, 6 160 1 4",
    "151M": "2 12 1 0, 6 16 2 4, 3 16 1 3, 6 32 2 4, 3 32 1 3, 6 64 2 4, 4 64 1 4, 6 88 1 4,"
    "6 88 1 4, 6 128 2 4, 6 128 1 4, 6 128 1 4",
    "96M": "2 12 1 0, 6 16 2 4, 6 32 2 4, 3 32 1 3, 6 64 2 4, 4 64 1 4, 6 88 1 4, 6 128 2 4,"
    "6 128 1 4",
    "52M": "3 12 2 0, 3 12 1 3, 6 24 2 4, 3 24 1 3, 6 48 2 4, 4 48 1 4, 6 64 1 4, 6 96 2 4,"
    "6 96 1 4",
}
_ROWS["26M"] = _ROWS["52M"]
_HEAD_DIMS = {1440: 1920, 1152: 1920, 960: 1600, 768: 1280, 576: 1024}  # by expanded width
# The first logit, and mean magnitudes of last map and tokens, for ``_images()``: recorded in
# float64 with github.com/AAboys/MobileFormer at commit f447310.
_RECORDED = {
    "508M": [0.7202229198301877, 2.6525958182823404, 0.7905919142302484],
    "294M": [0.14728599245621937, 2.573235637109263, 0.8248787956130216],
    "214M": [-0.29258043216220325, 2.4530556583246717, 0.8118957930750841],
    "151M": [-0.3336323244188607, 2.956122172344686, 0.806653469377018],
    "96M": [1.5028173397835767, 1.760529917228169, 0.8492903997745556],
    "52M": [-0.7568906588044152, 1.6908393148730143, 0.8062822246362371],
    "26M": [-0.6933579467992725, 1.5256246707673637, 0.7829392007822906],
}


class _Shapes(dict[str, tuple[int, ...]]):
    """Shapes of all tensors of an official network by name."""

    def __init__(self, size):
        super().__init__()
        arch = MOBILE_FORMER_ARCHS[size]
        self.groups, self.dim, channels = 4 if size == "26M" else 1, arch.token_dim, arch.stem
        self["tokens.weight"] = (arch.num_tokens, arch.token_dim)
        self.convolution("stem", 0, arch.stem, 3, 3)
        for index, row in enumerate(_ROWS[size].split(",")):
            first, out, stride, second = map(int, row.split())
            self.block(f"features.{index}", channels, first, out, stride, second)
            channels = out
        self.to_tokens("local_global", channels)
        self.convolution("classifier.conv", 1, arch.expanded, channels // self.groups)
        hidden = _HEAD_DIMS[arch.expanded]
        self.linear("classifier.fc.0", hidden, arch.expanded + arch.token_dim)
        self.norm("classifier.fc.1", hidden)
        self.linear("classifier.classifier.1", 1000, hidden)

    def linear(self, name, out, inputs):
        self.update({f"{name}.weight": (out, inputs), f"{name}.bias": (out,)})

    def norm(self, name, width, *, batch=True):
        kinds = ("weight", "bias", "running_mean", "running_var") if batch else ("weight", "bias")
        self.update({f"{name}.{kind}": (width,) for kind in kinds})

    def convolution(self, name, number, out, inputs, side=1):
        self[f"{name}.{number}.weight"] = (out, inputs, side, side)
        self.norm(f"{name}.{number + 1}", out)

    def to_tokens(self, name, width):
        self.linear(f"{name}.q", width, self.dim)
        self.linear(f"{name}.alpha.0", width, self.dim)
        self.linear(f"{name}.proj", self.dim, width)
        self.norm(f"{name}.layer_norm", self.dim, batch=False)

    def activation(self, name, width):
        self.linear(f"{name}.hyper.0", self.dim // 4, self.dim)
        self.linear(f"{name}.hyper.2", 2 * width, self.dim // 4)

    def block(self, own, channels, first, out, stride, second):
        hidden, groups, dim = channels * first, self.groups, self.dim
        if not second:
            self.convolution(f"{own}.conv", 0, hidden, 1, 3)
            self.convolution(f"{own}.conv", 4, out, hidden // groups)
            return
        if stride == 2:
            self.convolution(f"{own}.conv1", 0, hidden, 1, 3)
            self.convolution(f"{own}.conv2", 0, out, hidden // groups)
            self.convolution(f"{own}.conv3", 0, out * second, 1, 3)
            self.convolution(f"{own}.conv4", 0, out, out * second // groups)
            self.activation(f"{own}.hyper1", hidden)
            self.activation(f"{own}.hyper3", out * second)
        else:
            self.convolution(f"{own}.conv1", 0, hidden, channels // groups)
            self.convolution(f"{own}.conv2", 0, hidden, 1, 3)
            self.convolution(f"{own}.conv3", 0, out, hidden // groups)
            self.activation(f"{own}.hyper1", hidden)
            self.activation(f"{own}.hyper2", hidden)
        self.to_tokens(f"{own}.local_global", channels)
        self.linear(f"{own}.global_block.ffn.0", 2 * dim, dim)
        self.linear(f"{own}.global_block.ffn.2", dim, 2 * dim)
        self.norm(f"{own}.global_block.ffn_norm", dim, batch=False)
        self.linear(f"{own}.global_block.q", dim, dim)
        self.linear(f"{own}.global_block.channel_mlp", dim, dim)
        self.norm(f"{own}.global_block.layer_norm", dim, batch=False)
        self.linear(f"{own}.global_local.k", out, dim)
        self.linear(f"{own}.global_local.proj", out, dim)


def _draw(name, shape):
    """Returns a random tensor that is a function of its name; maps keep their scale."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name.endswith("running_var"):
        return values.abs() + 0.5
    if len(shape) == 1:
        return 0.2 * values + float(name.endswith("weight"))
    return values / (values[0].numel() ** 0.5)


@functools.cache
def _state(size):
    """Random weights of an official network, in float32."""
    return {name: _draw(name, shape).float() for name, shape in _Shapes(size).items()}


def _classify(expanded, tokens, state):
    """Returns the logits (N, 1000) of the authors' classifier, which is not converted."""
    pooled = F.hardswish(expanded.mean(dim=(2, 3)))
    hidden = F.linear(
        torch.cat([pooled, tokens[:, 0]], dim=1),
        *(state[f"classifier.fc.0.{kind}"] for kind in ("weight", "bias")),
    )
    kinds = ("running_mean", "running_var", "weight", "bias")
    hidden = F.batch_norm(hidden, *(state[f"classifier.fc.1.{kind}"] for kind in kinds))
    last = (state[f"classifier.classifier.1.{kind}"] for kind in ("weight", "bias"))
    return F.linear(F.hardswish(hidden), *last)


def _images():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 70, 96, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("size", _ROWS)
def test_converted_weights_give_what_the_authors_code_gives(size):
    state = {name: _draw(name, shape) for name, shape in _Shapes(size).items()}
    assert find_size(state) == size
    model = MobileFormer(
        arch=MOBILE_FORMER_ARCHS[size], out_features=["s32", "s32_expanded", "tokens"]
    )
    fit = model.double().eval().load_state_dict(convert_official(state), strict=False)
    assert not fit.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in fit.missing_keys)
    with torch.no_grad():
        maps = model(_images())
    logits = _classify(maps["s32_expanded"], maps["tokens"], state)
    found = [logits[0, 0], maps["s32"].abs().mean(), maps["tokens"].abs().mean()]
    assert [value.item() for value in found] == pytest.approx(_RECORDED[size], rel=1e-12)


def test_a_file_is_for_the_networks_of_its_size(tmp_path):
    state = _state("96M")
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": wrapped}, tmp_path / "official.pth")
    weights = str(tmp_path / "own.safetensors")
    convert_weights(str(tmp_path / "official.pth"), Path(weights), "MobileFormer")
    encoder = qbheat_det.load(weights)
    assert encoder(np.zeros((64, 64, 3), np.uint8))["s32"].shape == (1, 128, 2, 2)
    arch = MOBILE_FORMER_ARCHS["96M"]
    backbone = MobileFormer(arch=arch, out_features=["s16", "s32_expanded", "tokens"])
    SafeCheckpointer(backbone).load(weights)
    expected = convert_official(state)
    found = {name: backbone.state_dict()[name] for name in expected}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    other = MobileFormer(arch=MOBILE_FORMER_ARCHS["151M"], out_features=["s32"])
    with pytest.raises(UserError, match=r"own\.safetensors"):
        SafeCheckpointer(other).load(weights)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"features.3.local_global.q.weight": None}, "1 missing"),
        ({"stem.1.running_var": None}, "stem.norm.running_var"),
        ({f"features.8.{name}.0.weight": None for name in ("conv3", "conv4")}, "features.8.conv4"),
        ({"classifier.conv.1.weight": None}, "classifier.conv.1.weight"),
        ({"tokens.weight": torch.zeros(2, 128)}, "tokens"),
        ({"tokens.weight": torch.zeros(())}, r"official\.pth"),
        ({"features.0.conv.0.weight": torch.zeros(0)}, r"official\.pth"),
        ({"stem.1.bias": torch.full((8,), torch.nan)}, "NaN"),
    ],
)
def test_an_incomplete_file_of_the_authors_network_is_refused(changes, named, tmp_path):
    state = {**_state("52M"), **changes}
    changed = {name: tensor for name, tensor in state.items() if tensor is not None}
    wrapped = {"state_dict": {f"module.{name}": tensor for name, tensor in changed.items()}}
    torch.save(wrapped, tmp_path / "official.pth")
    output = tmp_path / "own.safetensors"
    with pytest.raises(UserError, match=named):
        convert_weights(str(tmp_path / "official.pth"), output, "MobileFormer")
    assert not output.exists()


TOOL = load_tool("convert_weights")


def test_efficientnet_lites_tensors_are_timms_in_their_order(tmp_path):
    own = timm.create_model("tf_efficientnet_lite0").state_dict()
    kinds = [name.rpartition(".")[2] for name in own]
    theirs = {f"_{i}.{kinds[i]}": v for i, v in enumerate(own.values())}
    theirs = {"_conv_stem.weight": theirs.pop("_0.weight"), **theirs}
    torch.save(theirs, tmp_path / "theirs.pth")
    output = tmp_path / "ours.safetensors"
    convert_weights(str(tmp_path / "theirs.pth"), output, "timm:tf_efficientnet_lite0")
    found, info = read_weights(str(output))
    assert len(own) - len(found) == 8  # the last convolution and the classifier
    expected = {name: own[name.removeprefix("net.")] for name in found}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert (info.pixel_mean, info.pixel_std) == ((127.0,) * 3, (128.0,) * 3)
    weights, other = str(tmp_path / "theirs.pth"), "timm:tf_efficientnet_lite1"
    with pytest.raises(UserError, match="tf_efficientnet_lite1"):
        convert_weights(weights, tmp_path / "other.safetensors", other)
    items = [*theirs.items()]
    items[1:3] = items[2:0:-1]  # the bias of a norm before its weight
    torch.save(dict(items), weights)
    with pytest.raises(UserError, match=r"theirs\.pth"):
        convert_weights(weights, tmp_path / "other.safetensors", "timm:tf_efficientnet_lite0")


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """The authors' smallest network, in a file."""
    path = tmp_path_factory.mktemp("official") / "theirs.safetensors"
    save_file(_state("26M"), path)
    return str(path)


def test_what_does_not_fit_is_refused(tmp_path, official):
    output, existing = tmp_path / "ours.safetensors", tmp_path / "other.safetensors"
    existing.write_text("")
    for target, to, named in (
        (output, "resnet18", "'resnet18'"),
        (output, "timm:tf_efficientnet_lite0", "tf_efficientnet_lite0"),
        (output, "timm:efficientnet_lite0", "timm:efficientnet_lite0"),
        (tmp_path / "ours.pth", "MobileFormer", r"ours\.pth"),
        (existing, "MobileFormer", "--overwrite"),
    ):
        with pytest.raises(UserError, match=named):
            convert_weights(official, target, to)
    assert not output.exists()


def test_the_tool_prints_the_report_and_the_keys(tmp_path, official, capsys):
    output = tmp_path / "ours.safetensors"
    arguments = ["--weights", official, "--to", "MobileFormer", "--output", str(output)]
    TOOL.main(arguments)
    printed = capsys.readouterr().out
    for words in (
        "MODEL.MOBILE_FORMER.VARIANT 26M",
        'MODEL.PIXEL_MEAN "[123.675, 116.28, 103.53]"',
    ):
        assert words in printed
    assert "--overwrite" in refuse(TOOL.main, arguments, capsys)

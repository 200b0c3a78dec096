# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Wraps any convolutional network of timm as a Detectron2 backbone.

Importing this module registers every model of ``timm.list_models()`` as ``timm:<name>``, so that
Detectron2 can build a backbone from ``MODEL.BACKBONE.NAME: "timm:resnet18"``.
``checkpoint/convert.py`` downloads weights, and renames them if needed. The checkpointer loads
them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import timm
import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from timm.layers import BatchNormAct2d, Conv2dSame, FrozenBatchNormAct2d
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from qbheat_det.config import Pixels, reads_our_keys
from qbheat_det.config.loading import TIMM_PREFIX, check_timm_name
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.checks import check_value

from .fpn import accept_prefixes
from .norm_inputs import NormInputs
from .trained_pixels import check_trained_pixels

_PROBE_SIZE = (64, 96)  # image size for which height, width and channels of feature maps differ


class TimmBackbone(Backbone):
    """Returns the feature maps of a timm model, named by stride: "s2", "s4", "s8", "s16", "s32".

    If several feature maps have the same stride, the last one is used. Stages after the last output
    are removed. Images are padded to a multiple of the coarsest stride, and padding is treated as
    part of the image. ``net`` is the timm model. ``norm_inputs`` has, by the name of a BatchNorm,
    the name of the convolution whose output only this BatchNorm reads.
    """

    freeze_all = 5
    """The lowest ``freeze_at`` that freezes the whole network."""

    def __init__(
        self,
        *,
        name: str,
        out_features: Sequence[str],
        freeze_at: int = 0,
        in_channels: int = 3,
        pixels: Pixels | None = None,
        freeze_norms: bool = False,
    ) -> None:
        """
        Args:
            name: name of the timm model.
            out_features: names of the outputs.
            freeze_at: 0 trains everything. k freezes all layers that compute the feature maps of
                stride 2^k or less (in a ResNet, 2 freezes the stem and the first stage, as in
                Detectron2). 5 or more freezes the whole network. Frozen BatchNorms keep their
                statistics.
            in_channels: channels of the image.
            pixels: the pixels that the model passes to the backbone. A warning is logged if weights
                are loaded that were trained on others.
            freeze_norms: whether all BatchNorms keep their statistics, weights and biases, as
                Detectron2's "FrozenBN".

        Raises:
            UserError: timm has no such model, or its feature maps do not have fixed strides.
            ValueError: an output name is unknown, or ``freeze_at`` is negative.
        """
        super().__init__()
        check_value(freeze_at >= 0, "BACKBONE.FREEZE_AT", freeze_at, "at least 0")
        check_timm_name(name)
        self.timm_name = name
        self.net = timm.create_model(name, pretrained=False, in_chans=in_channels)
        for path, module in list(self.net.named_modules()):
            if type(module) is Conv2dSame:
                self.net.set_submodule(path, TraceableConv2dSame.from_conv(module))
            elif type(module) is nn.ReLU6 and module.inplace:
                self.net.set_submodule(path, LeanReLU6(inplace=True))
        infos = _list_maps(self.net, name)  # timm's description of each feature map
        if not out_features or set(out_features) - set(infos):
            raise ValueError(f"outputs of timm's '{name}' are {[*infos]}, not {list(out_features)}")
        # Sorted from the first to the last stage.
        self._out_features = sorted(set(out_features), key=lambda key: infos[key]["index"])
        names_before = set(self.net.state_dict())
        self._indices = self.net.prune_intermediate_layers(
            [infos[key]["index"] for key in self._out_features], prune_norm=True
        )
        # Checkpoints of the whole model contain the removed modules.
        removed_modules: set[str] = set()
        for tensor_name in names_before - set(self.net.state_dict()):
            module, _, _ = tensor_name.rpartition(".")
            if module:  # not a parameter of the network itself
                removed_modules.add(module)
        self.optional_modules = tuple(f"net.{module}" for module in sorted(removed_modules))
        # Detectron2's Backbone builds output_shape() from these two.
        self._out_feature_channels = {key: infos[key]["num_chs"] for key in self._out_features}
        self._out_feature_strides = {key: infos[key]["reduction"] for key in self._out_features}
        sources, self.norm_inputs = self._find_sources(name, infos, in_channels)
        self._freeze(freeze_at, sources, freeze_norms=freeze_norms)
        accept_prefixes(self)
        check_trained_pixels(self, pixels)

    @property
    def size_divisibility(self) -> int:
        """The coarsest stride. Height and width of images must be multiples of it.

        Networks differ in how they round other sizes.
        """
        return max(self._out_feature_strides.values())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Takes padded images (N, 3, H, W). Returns feature maps (N, C, H / s, W / s) by name."""
        feature_maps = self._compute_maps(x, self._indices)
        return dict(zip(self._out_features, feature_maps, strict=True))

    def _compute_maps(self, x: Tensor, indices: Sequence[int]) -> list[Tensor]:
        """Returns the feature maps (N, C, H / s, W / s) at timm's ``indices``."""
        return self.net.forward_intermediates(
            x, indices=list(indices), output_fmt="NCHW", intermediates_only=True
        )

    def _find_sources(
        self, name: str, infos: Mapping[str, dict[str, Any]], in_channels: int
    ) -> tuple[dict[str, set[str]], dict[str, str]]:
        """Runs the network once.

        Returns the names of the parameters that each map depends on, and ``norm_inputs``. Raises a
        ``UserError`` if a feature map does not have the shape that timm lists.
        """
        last_index = max(self._indices)
        built = {key: info for key, info in infos.items() if info["index"] <= last_index}
        parameters = dict(self.net.named_parameters())
        device = next(iter(parameters.values())).device
        x = torch.zeros(1, in_channels, *_PROBE_SIZE, device=device)
        self.net.eval()
        with torch.enable_grad(), NormInputs(self.net) as norm_inputs:
            try:
                feature_maps = self._compute_maps(x, [info["index"] for info in built.values()])
            except Exception as error:  # models raise errors of many types
                raise _refusal(name, f"({type(error).__name__})") from error
            pairs = norm_inputs.find(feature_maps)
            sources: dict[str, set[str]] = {}
            for (key, info), feature_map in zip(built.items(), feature_maps, strict=True):
                height, width = (math.ceil(side / info["reduction"]) for side in _PROBE_SIZE)
                expected = (info["num_chs"], height, width)
                shape = tuple(feature_map.shape[1:])
                if shape != expected:
                    raise _refusal(name, f"('{key}' is {shape}, not {expected})")
                gradients = torch.autograd.grad(
                    feature_map.sum(),
                    list(parameters.values()),
                    allow_unused=True,
                    retain_graph=True,
                )
                # The gradient is None for parameters that the feature map does not depend on.
                sources[key] = set()
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        sources[key].add(parameter)
        self.net.train()
        return sources, pairs

    def _freeze(
        self, freeze_at: int, sources: Mapping[str, set[str]], *, freeze_norms: bool
    ) -> None:
        """Freezes the first layers, parameters that no output depends on, and maybe all norms.

        ``sources`` are the names of the parameters that each feature map depends on. ``freeze_at``
        k freezes the sources of the feature maps of stride 2^k or less. 0 freezes none.
        """
        used: set[str] = set()
        frozen: set[str] = set()
        for key, names in sources.items():
            if key in self._out_features:
                used |= names
            stride = int(key.removeprefix("s"))
            is_in_frozen_stage = freeze_at > 0 and stride <= 2**freeze_at
            if is_in_frozen_stage or freeze_at >= self.freeze_all:
                frozen |= names
        for name, parameter in self.net.named_parameters():
            # In networks with several branches, some remaining parameters reach no output.
            parameter.requires_grad_(name in used - frozen)
        for path, module in list(self.net.named_modules()):
            is_frozen = freeze_norms or f"{path}.weight" in frozen
            if is_frozen and isinstance(module, _BatchNorm):
                self.net.set_submodule(path, FrozenNorm.from_norm(module))


def list_outputs(name: str) -> list[str]:
    """Lists a timm model's feature maps, finest first. Raises a ``UserError`` if it has none."""
    check_timm_name(name)
    with torch.device("meta"):  # allocates no weights
        return list(_list_maps(timm.create_model(name, pretrained=False), name))


def _list_maps(net: nn.Module, name: str) -> dict[str, dict[str, Any]]:
    """Returns timm's ``feature_info`` of the last map at each stride, by name such as "s8"."""
    infos = getattr(net, "feature_info", None)
    if not infos or not hasattr(net, "prune_intermediate_layers"):
        raise _refusal(name, "(timm lists none)")
    maps = {
        f"s{info['reduction']}": {**info, "index": index}
        for index, info in enumerate(getattr(infos, "info", infos))
    }
    return dict(sorted(maps.items(), key=lambda item: item[1]["index"]))


def _refusal(name: str, reason: str) -> UserError:
    """Returns the error for a timm model that cannot be a backbone."""
    return UserError(
        f"timm's '{name}' has no maps at fixed strides for images of any size {reason}: choose a "
        "convolutional network, such as resnet18, efficientnet_b0, mobilenetv4_conv_small or "
        "convnext_atto"
    )


def register_timm_backbone(name: str) -> None:
    """Registers ``timm:<name>`` with Detectron2."""

    @reads_our_keys
    def build(cfg: CfgNode, input_shape: ShapeSpec) -> TimmBackbone:
        return TimmBackbone(
            name=name,
            out_features=cfg.MODEL.TIMM.OUT_FEATURES,
            freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
            in_channels=input_shape.channels,
            pixels=Pixels.from_config(cfg),
            freeze_norms=cfg.MODEL.TIMM.FREEZE_NORMS,
        )

    build.__name__ = f"{TIMM_PREFIX}{name}"
    BACKBONE_REGISTRY.register(build)


for _name in timm.list_models():
    register_timm_backbone(_name)


class FrozenNorm(FrozenBatchNormAct2d):
    """timm's frozen BatchNorm and activation in fewer passes over the feature map.

    Under autocast, the output has the dtype of the input, as with ``nn.BatchNorm2d``.
    """

    @classmethod
    def from_norm(cls, norm: _BatchNorm) -> "FrozenNorm":
        """Returns a layer with the statistics, weights and activation of ``norm``."""
        layer = cls(norm.num_features, eps=norm.eps, apply_act=False)
        layer.load_state_dict(norm.state_dict(), strict=False)
        if isinstance(norm, BatchNormAct2d):
            layer.drop = norm.drop
            layer.act = norm.act
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (N, C, H, W)."""
        x = functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )
        return self.act(self.drop(x))


class LeanReLU6(nn.ReLU6):
    """``nn.ReLU6`` that stores only its output for the backward pass.

    PyTorch's ``nn.ReLU6`` also stores its input, which takes a third of the activation memory of
    EfficientNet-Lite.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and input.requires_grad):
            return super().forward(input)
        return _ReLU6.apply(input)


class _ReLU6(torch.autograd.Function):
    """ReLU6 in place, whose backward pass reads the output instead of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        functional.relu6(x, inplace=True)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # The output is exactly 0 or 6 where the input was out of range, so the gradient is 0 there.
        (y,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(gradient, y, 0.0, 6.0)


class TraceableConv2dSame(Conv2dSame):
    """``Conv2dSame`` that pads by a fixed amount when traced with dynamic image sizes.

    With timm's expression for the padding, which depends on the image size, ``torch.export`` of a
    whole network does not terminate. The fixed padding equals "same" padding if height and width
    of the input are multiples of the stride. In traced models they are.
    """

    @classmethod
    def from_conv(cls, conv: Conv2dSame) -> "TraceableConv2dSame":
        """Returns a layer that shares the parameters of ``conv``."""
        with torch.device("meta"):  # draws no random numbers
            layer = cls(
                conv.in_channels,
                conv.out_channels,
                conv.kernel_size,
                conv.stride,
                dilation=conv.dilation,
                groups=conv.groups,
                bias=conv.bias is not None,
            )
        layer.weight = conv.weight
        layer.bias = conv.bias
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Takes a feature map (N, C, H, W). Returns (N, C', H / stride, W / stride), rounded up."""
        is_fixed_size = type(x.shape[2]) is int and type(x.shape[3]) is int
        if is_fixed_size or not torch.compiler.is_compiling():
            return super().forward(x)
        total_padding = []  # of rows and columns
        for axis in (0, 1):
            extent = self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
            total_padding.append(max(extent - self.stride[axis], 0))
        rows, columns = total_padding
        top = rows // 2
        left = columns // 2
        x = functional.pad(x, (left, columns - left, top, rows - top))
        return functional.conv2d(
            x,
            self.weight,
            self.bias,
            self.stride,
            padding=0,
            dilation=self.dilation,
            groups=self.groups,
        )

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Converts a trained model to its fastest equivalent form in PyTorch."""

import contextlib
import copy
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from qbheat_det.core.environment import keep_freed_memory, supports_bfloat16
from qbheat_det.core.errors import UserError
from qbheat_det.fast import count_fast_layers, fold_batch_norms, optimize
from qbheat_det.modeling.contracts import masks_padding

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PARTS = ("backbone", "decoder", "head", "proposal_generator.rpn_head")


class DeployReport(dict[str, str]):
    """A description of each step of ``deploy``, by the name of the step.

    The description starts with "no: " if the step was not applied.
    """

    def __str__(self) -> str:
        return "\n".join(f"{name:<14}{detail}" for name, detail in self.items())


class DeployedModel(nn.Module):
    """A copy of a model for inference only, with the same interface as the original.

    Attributes:
        model: the folded and fused copy, of the same class as the original.
        report: the steps of ``deploy`` and their results.
        dtype: dtype in which backbone and heads compute. Results are float32.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, report: DeployReport) -> None:
        super().__init__()
        self.model = model
        self.report = report
        self.dtype = dtype
        self._masks_padding = masks_padding(model)
        if dtype != torch.float32:
            # Under autocast, these parts return bfloat16. The rest of the model expects float32.
            for part in find_parts(model).values():
                part.register_forward_hook(_to_float32)
        self.eval()

    @torch.no_grad()
    def forward(self, inputs: Any) -> Any:
        """Takes a list of dicts with "image" (3, H, W), or a tensor (N, 3, H, W) for backbones.

        Returns what the original model returns. The autocast of the caller has no effect.
        """
        device_type = next(self.model.parameters()).device.type
        is_half = self.dtype != torch.float32
        with torch.autocast(device_type, self.dtype, enabled=is_half):
            if isinstance(inputs, Tensor):
                return self.model(inputs.contiguous(memory_format=torch.channels_last))
            image_sizes = {tuple(entry["image"].shape[-2:]) for entry in inputs}
            if self._masks_padding and len(image_sizes) > 1:
                # Images of different sizes would be padded. One by one is faster, and results are
                # equal, because this model masks the padding.
                return [self.model([entry])[0] for entry in inputs]
            return self.model(inputs)

    @property
    def size_divisibility(self) -> int:
        """Backbones only: heights and widths of images must be multiples of this number."""
        return int(self.model.size_divisibility)  # type: ignore[arg-type]

    def train(self, mode: bool = True) -> "DeployedModel":
        """Keeps the model in evaluation mode.

        Raises a ``UserError`` if ``mode`` is True, because folded weights cannot be trained.
        """
        if mode:
            raise UserError("a deployed model does not train: train the original and deploy it")
        return super().train(mode=False)


def deploy(
    model: nn.Module, *, precision: str = "float32", keep_memory: bool = True
) -> DeployedModel:
    """Returns a copy of a trained model in the fastest equivalent form on the model's device.

    Folds BatchNorm, fuses blocks (CPU), and makes feature maps channels-last. In float32, scores
    differ from those of the original model by less than 0.001, and boxes by less than 0.1 pixel.

    Args:
        model: a detector, classifier or backbone, with its weights, on its device. Not changed.
        precision: "float32", or "bfloat16", which changes AP by a few tenths.
        keep_memory: whether this process keeps freed memory for the next image (CPU with glibc).

    Raises:
        UserError: an argument is invalid, or the model is already deployed or has no backbone.
    """
    if precision not in _DTYPES:
        raise UserError(f"precision is one of {', '.join(_DTYPES)}, not {precision!r}")
    if isinstance(model, DeployedModel):
        raise UserError("the model is deployed already: deploy the original with other settings")
    find_parts(model)  # raises an error if the model has no backbone
    device = next(model.parameters()).device
    report = DeployReport()
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    _rewrite(copied, device, report)
    report["memory"] = "no: not asked for"
    if keep_memory:
        is_kept = device.type == "cpu" and keep_freed_memory()
        report["memory"] = "freed memory is kept" if is_kept else "no: only on CPUs with glibc"
    report["precision"] = _describe_precision(precision, device)
    return DeployedModel(copied, _DTYPES[precision], report)


def deploy_by_config(model: nn.Module, node: CfgNode) -> DeployedModel:
    """Calls ``deploy`` with the values of ``MODEL.DEPLOY``, without reading ``ENABLED``."""
    return deploy(model, precision=node.PRECISION, keep_memory=node.KEEP_MEMORY)


def find_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the backbone and the heads of a model, which take most of the time, by name.

    Raises a ``UserError`` if the model has no backbone.
    """
    if isinstance(model, Backbone):
        return {"backbone": model}
    parts = {}
    for path in _PARTS:
        with contextlib.suppress(AttributeError):  # most models have only some of the parts
            parts[path] = model.get_submodule(path)
    if "backbone" not in parts:
        raise UserError(
            f"{type(model).__name__} has no backbone: deploy takes detectors, classifiers and "
            "backbones"
        )
    return parts


def _rewrite(model: nn.Module, device: torch.device, report: DeployReport) -> None:
    """Folds, fuses and makes channels-last, in place. Adds these steps to ``report``."""
    num_folded, num_left = fold_batch_norms(model)
    report["fold"] = f"{num_folded or 'no: no'} BatchNorms are folded into convolutions"
    if num_left:
        report["fold"] += f"; {num_left} do not follow a convolution and stay"
    if device.type == "cpu":
        optimize(model, "cpu_inference")
        num_fast = count_fast_layers(model)
        report["fuse"] = f"{num_fast or 'no: no'} layers have a faster form"
    else:
        report["fuse"] = "no: only on CPUs"
    model.to(memory_format=torch.channels_last)
    report["channels-last"] = "weights and feature maps have their channels last"


def _describe_precision(precision: str, device: torch.device) -> str:
    is_native = supports_bfloat16(device)
    if precision == "bfloat16":
        if is_native:
            return "bfloat16 by autocast"
        return "bfloat16 by autocast, slower: this device emulates it"
    if is_native and device.type != "cpu":
        return "no: float32; precision='bfloat16' is faster, and not equal"
    return "no: float32"


def _to_float32(_: nn.Module, __: Any, output: Any) -> Any:
    """A forward hook that casts all half-precision tensors of a module's output to float32."""

    def cast_to_float32(x: Any) -> Any:
        is_half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        return x.float() if is_half else x

    return tree_map(cast_to_float32, output)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``deploy``: brings a trained model into its fastest equal form, step by step."""

import copy
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import nn

from qbheat_det.core.environment import keep_freed_memory
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_duration
from qbheat_det.modeling.contracts import FixedSizeModel

from .compiling import (
    compile_for_cpu,
    compile_for_cuda,
    find_parts,
    restore_parts,
)
from .deployed_model import DeployedModel
from .folding import fold_batch_norms
from .fused_blocks import fuse_blocks
from .precision import DTYPES, supports_bfloat16
from .report import DeployReport

logger = logging.getLogger(__name__)

_COMPILE = ("auto", "off")
_DYNAMIC_SIZE = (512, 640)  # of the image that code for all sizes is compiled with


def deploy(
    model: nn.Module,
    *,
    precision: str = "float32",
    compile: str = "auto",
    image_sizes: Sequence[Sequence[int]] = (),
    keep_memory: bool = True,
) -> DeployedModel:
    """Returns a copy of a trained model in its fastest equal form on the model's device.

    It is called as the model is, with images of any size. BatchNorm is folded, blocks are fused
    (CPU), feature maps are channels-last, and backbone and heads are compiled for ``image_sizes``.
    Compiling takes minutes; on CPUs the result is kept on disk, and later processes load it in
    tenths of a second. In float32, scores differ from the model's by less than 0.001 and boxes by
    less than 0.1 pixel.

    Args:
        model: a detector, classifier or backbone, with its weights, on its device. Not changed.
        precision: "float32", or "bfloat16", which is not equal: AP changes by some tenths.
        compile: "auto", or "off".
        image_sizes: (height, width) in pixels of images as the model gets them, to compile for. On
            the CPU other sizes run uncompiled. On CUDA, code is compiled for all sizes if none is
            given, and recorded as CUDA graphs if they are.
        keep_memory: keep freed memory for the next image (CPU with glibc). Holds for the whole
            process.

    Raises:
        UserError: an argument is not valid, the model is deployed already or has no backbone, or it
            does not take an image of ``image_sizes``.
    """
    sizes = _check_arguments(precision, compile, image_sizes)
    if isinstance(model, DeployedModel):
        raise UserError("the model is deployed already: deploy the original with other settings")
    find_parts(model)  # raises
    device = next(model.parameters()).device
    report = DeployReport()
    with torch.inference_mode(False):  # whatever the caller's mode, for weights that compile
        copied = copy.deepcopy(model).eval().requires_grad_(False)
        _rewrite(copied, device, report)
        _keep_memory(keep_memory, device, report)
        _describe_precision(precision, device, report)
        deployed = DeployedModel(copied, DTYPES[precision], report)
        if compile == "off":
            report.add("compile", False, "not asked for")
        elif device.type == "cpu" and not sizes:
            report.add("compile", False, "image_sizes name no size to compile for")
        else:
            _compile(deployed, sizes, device)
    return deployed


def deploy_by_config(model: nn.Module, node: CfgNode) -> DeployedModel:
    """Deploys a model as ``MODEL.DEPLOY`` says.

    Args:
        model: as for ``deploy``.
        node: ``MODEL.DEPLOY`` of a config; ``ENABLED`` is not read.

    Raises:
        UserError: as ``deploy``.
    """
    return deploy(
        model,
        precision=node.PRECISION,
        compile=node.COMPILE,
        image_sizes=node.IMAGE_SIZES,
        keep_memory=node.KEEP_MEMORY,
    )


def _check_arguments(precision: Any, compile: Any, image_sizes: Any) -> list[tuple[int, int]]:
    """Returns ``image_sizes`` as tuples."""
    if precision not in DTYPES:
        raise UserError(f"precision is one of {', '.join(DTYPES)}, not {precision!r}")
    if compile not in _COMPILE:
        raise UserError(f"compile is one of {', '.join(_COMPILE)}, not {compile!r}")
    try:
        sizes = [(height, width) for height, width in image_sizes]
    except (TypeError, ValueError):
        sizes = [(0, 0)]
    if not all(type(length) is int and length > 0 for size in sizes for length in size):
        raise UserError(f"image_sizes is a list of [height, width] in pixels, not {image_sizes!r}")
    return sizes


def _rewrite(model: nn.Module, device: torch.device, report: DeployReport) -> None:
    folded, left = fold_batch_norms(model)
    rest = f"; {left} follow no convolution and stay" if left else ""
    detail = f"{folded} BatchNorms are folded into convolutions{rest}"
    report.add("fold", folded > 0, detail if folded or left else "there is no BatchNorm")
    fused = fuse_blocks(model) if device.type == "cpu" else 0
    none = "the model has no blocks with a fused form" if device.type == "cpu" else "only on CPUs"
    report.add("fuse", fused > 0, f"{fused} blocks are fused for single images" if fused else none)
    model.to(memory_format=torch.channels_last)
    report.add("channels-last", True, "weights and feature maps have their channels last")


def _keep_memory(wanted: bool, device: torch.device, report: DeployReport) -> None:
    kept = wanted and device.type == "cpu" and keep_freed_memory()
    why_not = "only on CPUs with glibc" if wanted else "not asked for"
    report.add("memory", kept, "this process keeps freed memory" if kept else why_not)


def _describe_precision(precision: str, device: torch.device, report: DeployReport) -> None:
    is_native = supports_bfloat16(device)
    if precision == "bfloat16":
        detail = "bfloat16 by autocast" + ("" if is_native else ", slower: this device emulates it")
    else:
        detail = "float32" + ("; precision='bfloat16' is faster, and not equal" * is_native)
    report.add("precision", precision == "bfloat16", detail)


def _compile(
    deployed: DeployedModel, sizes: Sequence[tuple[int, int]], device: torch.device
) -> None:
    report = deployed.report
    parts = find_parts(deployed.model)
    # A graph's next run overwrites its results: a detector has read them by then, a caller may not.
    graphs = device.type == "cuda" and bool(sizes) and not isinstance(deployed.model, Backbone)
    what = f"{' and '.join(parts)} for " + (
        ", ".join(f"{height}x{width}" for height, width in sizes) or "images of all sizes"
    )

    def run() -> None:
        for size in sizes or [_DYNAMIC_SIZE]:
            _run_random_image(deployed, size, device)

    run()  # raises where the model does not take a size
    logger.info("Compiling %s: this takes minutes, and less in later processes", what)
    start = time.perf_counter()
    try:
        if device.type == "cuda":
            deployed.has_cuda_graphs = graphs
            compile_for_cuda(parts.values(), dynamic=not sizes, cuda_graphs=graphs, run=run)
        else:
            compile_for_cpu(parts.values(), deployed.dtype, run)
    except Exception as error:  # of the compiler, of PyTorch, of Triton, each with its own type
        restore_parts(parts.values())
        deployed.has_cuda_graphs = False
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        report.add("compile", False, f"PyTorch cannot compile {what}: {reason}")
        logger.warning("PyTorch cannot compile %s: %s", what, reason)
        return
    if device.type == "cpu":
        deployed.compiled_sizes = frozenset(sizes)
    report.add("compile", True, f"{what}, in {format_duration(time.perf_counter() - start)}")
    if device.type == "cuda":
        none = "a backbone's outputs would be overwritten" if sizes else "image_sizes name no size"
        report.add("CUDA graphs", graphs, "one for each image size" if graphs else none)


def _run_random_image(deployed: DeployedModel, size: tuple[int, int], device: torch.device) -> None:
    """Runs a deployed model on one random image.

    Raises:
        UserError: the model does not take the image.
    """
    model: Any = deployed.model
    try:
        if isinstance(model, Backbone):
            multiple = model.size_divisibility or 1  # a detector pads to it
            height, width = (-(-length // multiple) * multiple for length in size)
            channels = next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels
            deployed(torch.rand(1, channels, height, width, device=device))
        else:
            if isinstance(model, FixedSizeModel):
                size = model.image_size, model.image_size
            pixels = torch.randint(256, (len(model.pixel_mean), *size), dtype=torch.uint8)
            deployed([{"image": pixels, "height": size[0], "width": size[1]}])
    except Exception as error:
        raise UserError(
            f"image_sizes: the model does not take an image of {size[0]}x{size[1]} pixels: {error}"
        ) from error

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Converts a trained model to its fastest equivalent form: folds, fuses, lays out and compiles."""

import copy
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from qbheat_det.core.environment import keep_freed_memory, supports_bfloat16
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_duration
from qbheat_det.modeling.contracts import FixedSizeModel, masks_padding

from .compiling import PartPrograms, arithmetic, build_programs, find_parts
from .fused_blocks import fold_batch_norms, fuse_blocks

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_COMPILE = ("auto", "off")
_DYNAMIC_SIZE = (512, 640)  # size of the example image if code is compiled for all sizes


class DeployReport(dict[str, str]):
    """The result of each step of ``deploy``. It starts with "no: " if the step was not applied."""

    def __str__(self) -> str:
        return "\n".join(f"{name:<14}{detail}" for name, detail in self.items())


class DeployedModel(nn.Module):
    """A copy of a model for inference only, with the same interface as the original.

    Copies by ``copy.deepcopy`` and pickle are not compiled.

    Attributes:
        model: the folded, fused and possibly compiled copy; has the same class as the original.
        report: the steps of ``deploy`` and their results.
        compiled_sizes: image sizes (height, width) in pixels for which code is compiled.
        dtype: dtype of the computation in backbone and heads; results are float32.
        has_cuda_graphs: whether CUDA graphs are used, so that the next call overwrites the results.
        recompiles: whether ``torch.compile`` may compile code for inputs of other shapes.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, report: DeployReport) -> None:
        super().__init__()
        self.model = model
        self.report = report
        self.compiled_sizes: frozenset[tuple[int, int]] = frozenset()
        self.has_cuda_graphs = False
        self.recompiles = True
        self._masks_padding = masks_padding(model)
        self.dtype = dtype
        for part in find_parts(model).values() if dtype != torch.float32 else ():
            # Autocast gives the parts bfloat16 outputs. The rest of the model gets float32.
            part.register_forward_hook(_to_float32)
        self.eval()

    def forward(self, inputs: Any) -> Any:
        """Takes a list of dicts with "image" (3, H, W), or a tensor (N, 3, H, W) for backbones.

        The autocast and inference mode of the caller have no effect.
        """
        with arithmetic(self.dtype, next(self.model.parameters()).device.type):
            if isinstance(inputs, Tensor):
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            elif self._runs_images_alone(inputs):
                return [self._run([entry])[0] for entry in inputs]
            return self._run(inputs)

    @property
    def size_divisibility(self) -> int:
        """Image heights and widths must be multiples of this number (backbones only)."""
        return int(self.model.size_divisibility)  # type: ignore[arg-type]

    def train(self, mode: bool = True) -> "DeployedModel":
        """Stays in eval mode. Raises a ``UserError`` if ``mode`` is True, as weights are folded."""
        if mode:
            raise UserError("a deployed model does not train: train the original and deploy it")
        return super().train(False)

    def _runs_images_alone(self, inputs: list[dict[str, Any]]) -> bool:
        """Whether images are run one by one, because this is faster and gives equal results."""
        sizes = {(entry["image"].shape[-2], entry["image"].shape[-1]) for entry in inputs}
        return self._masks_padding if len(sizes) > 1 else sizes <= self.compiled_sizes

    def _run(self, inputs: Any) -> Any:
        if self.has_cuda_graphs:  # the results of the last call have been read
            torch.compiler.cudagraph_mark_step_begin()
        if self.recompiles:
            return self.model(inputs)
        with torch.compiler.set_stance("eager_on_recompile"):
            return self.model(inputs)


def deploy(
    model: nn.Module,
    *,
    precision: str = "float32",
    compile: str = "auto",
    image_sizes: Sequence[Sequence[int]] = (),
    keep_memory: bool = True,
) -> DeployedModel:
    """Returns a copy of a trained model in the fastest equivalent form on the model's device.

    Folds BatchNorm, fuses blocks (CPU), makes feature maps channels-last, and compiles backbone and
    heads for ``image_sizes``. Compiling takes about a minute. On CPUs, the compiled code is stored
    on disk, and later processes load it in tenths of a second. In float32, scores differ from those
    of the original model by less than 0.001, and boxes by less than 0.1 pixel.

    Args:
        model: a detector, classifier or backbone, with its weights, on its device. Not changed.
        precision: "float32", or "bfloat16", which changes AP by a few tenths.
        compile: "auto", or "off".
        image_sizes: image sizes (height, width) in pixels for which code is compiled. Images of all
            other sizes run uncompiled. On CUDA, code for these sizes is recorded as CUDA graphs. If
            empty, CUDA code is compiled for all sizes.
        keep_memory: whether this process keeps freed memory for the next image (CPU with glibc).

    Raises:
        UserError: an argument is invalid, the model is already deployed or has no backbone, or it
            does not accept an image of one of the ``image_sizes``.
    """
    sizes = _check_arguments(precision, compile, image_sizes)
    if isinstance(model, DeployedModel):
        raise UserError("the model is deployed already: deploy the original with other settings")
    find_parts(model)  # raises
    device = next(model.parameters()).device
    report = DeployReport()
    with torch.inference_mode(False):  # inference tensors cannot be compiled
        copied = copy.deepcopy(model).eval().requires_grad_(False)
        _rewrite(copied, device, report)
        report["memory"] = "no: not asked for"
        if keep_memory:
            kept = device.type == "cpu" and keep_freed_memory()
            report["memory"] = "freed memory is kept" if kept else "no: only on CPUs with glibc"
        report["precision"] = _describe_precision(precision, device)
        deployed = DeployedModel(copied, _DTYPES[precision], report)
        if compile == "off":
            report["compile"] = "no: not asked for"
        elif device.type == "cpu" and not sizes:
            report["compile"] = "no: image_sizes name no size to compile for"
        else:
            _compile(deployed, sizes, device)
    return deployed


def deploy_by_config(model: nn.Module, node: CfgNode) -> DeployedModel:
    """Calls ``deploy`` with the values of ``MODEL.DEPLOY``, without reading ``ENABLED``."""
    return deploy(
        model,
        precision=node.PRECISION,
        compile=node.COMPILE,
        image_sizes=node.IMAGE_SIZES,
        keep_memory=node.KEEP_MEMORY,
    )


def _check_arguments(precision: Any, compile: Any, image_sizes: Any) -> list[tuple[int, int]]:
    """Checks the arguments of ``deploy``, and returns ``image_sizes`` as tuples."""
    if precision not in _DTYPES:
        raise UserError(f"precision is one of {', '.join(_DTYPES)}, not {precision!r}")
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
    on_cpu = device.type == "cpu"
    folded, left = fold_batch_norms(model)
    rest = f"; {left} do not follow a convolution and stay" if left else ""
    report["fold"] = f"{folded or 'no: no'} BatchNorms are folded into convolutions{rest}"
    fused = fuse_blocks(model) if on_cpu else 0
    none = "no: the model has no blocks with a fused form" if on_cpu else "no: only on CPUs"
    report["fuse"] = f"{fused} blocks are fused for single images" if fused else none
    model.to(memory_format=torch.channels_last)
    report["channels-last"] = "weights and feature maps have their channels last"


def _describe_precision(precision: str, device: torch.device) -> str:
    is_native = supports_bfloat16(device)
    if precision == "bfloat16":
        return "bfloat16 by autocast" + ("" if is_native else ", slower: this device emulates it")
    return "no: float32" + ("; precision='bfloat16' is faster, and not equal" * is_native)


def _compile(
    deployed: DeployedModel, sizes: Sequence[tuple[int, int]], device: torch.device
) -> None:
    report = deployed.report
    parts = find_parts(deployed.model)
    # The next run of a CUDA graph overwrites its results. Detectors read them before that, but the
    # caller of a backbone may not.
    graphs = device.type == "cuda" and bool(sizes) and not isinstance(deployed.model, Backbone)
    what = f"{' and '.join(parts)} for " + (
        ", ".join(f"{height}x{width}" for height, width in sizes) or "images of all sizes"
    )

    def run() -> None:
        for size in sizes or [_DYNAMIC_SIZE]:
            _run_random_images(deployed, size, device)

    programs = [PartPrograms(part, deployed.dtype) for part in parts.values()]
    if device.type == "cpu":
        for part, program in zip(parts.values(), programs, strict=True):
            part._compiled_call_impl = program  # records the shapes to compile for
    run()  # raises an error if the model does not accept a size
    logger.info("Compiling %s: this takes a minute or more, and less in later processes", what)
    start = time.perf_counter()
    try:
        if device.type == "cpu":
            build_programs(programs)
        else:
            for part in parts.values():
                part.compile(dynamic=not sizes, mode="reduce-overhead" if graphs else None)
            deployed.has_cuda_graphs = graphs
            for _ in range(3 if graphs else 1):  # a graph is recorded in the second call
                run()
            if not sizes:  # code for one image is special
                _run_random_images(deployed, _DYNAMIC_SIZE, device, count=2)
            deployed.recompiles = False
    except Exception as error:  # PyTorch, the compiler and Triton raise errors of many types
        for part in parts.values():  # PyTorch has no public function for this
            part._compiled_call_impl = None
        deployed.has_cuda_graphs = False
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        report["compile"] = f"no: PyTorch cannot compile {what}: {reason}"
        logger.warning("PyTorch cannot compile %s: %s", what, reason)
        return
    report["compile"] = f"{what}, in {format_duration(time.perf_counter() - start)}"
    deployed.compiled_sizes = frozenset(sizes)
    if device.type != "cpu":
        none = "a backbone's outputs would be overwritten" if sizes else "image_sizes name no size"
        report["CUDA graphs"] = "one for each image size" if graphs else f"no: {none}"


def _run_random_images(
    deployed: DeployedModel, size: tuple[int, int], device: torch.device, *, count: int = 1
) -> None:
    """Runs a deployed model on random images; raises a ``UserError`` if this fails."""
    model: Any = deployed.model
    try:
        if isinstance(model, Backbone):
            multiple = model.size_divisibility or 1  # detectors pad images themselves
            height, width = (-(-length // multiple) * multiple for length in size)
            channels = next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels
            deployed(torch.rand(count, channels, height, width, device=device))
        else:
            if isinstance(model, FixedSizeModel):
                size = model.image_size, model.image_size
            pixels = torch.randint(256, (len(model.pixel_mean), *size), dtype=torch.uint8)
            deployed([{"image": pixels, "height": size[0], "width": size[1]}] * count)
    except Exception as error:
        raise UserError(
            f"image_sizes: the model does not take an image of {size[0]}x{size[1]} pixels: {error}"
        ) from error


def _to_float32(_: nn.Module, __: Any, output: Any) -> Any:
    """Casts tensors in half precision to float32."""

    def widen(x: Any) -> Any:
        is_half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        return x.float() if is_half else x

    return tree_map(widen, output)

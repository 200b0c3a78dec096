# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs a failed step again, and names the first module whose output contains inf or nan."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_model
from detectron2.structures import Boxes, ImageList, Instances
from detectron2.utils.events import EventStorage
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qbheat_det.checkpoint import load_embedded_config
from qbheat_det.config import find_memory_format, refuse_bad_values
from qbheat_det.core.text import join_first
from qbheat_det.feature_cache import replace_encoder
from qbheat_det.layers import NormedConv2d

from .failure import FailedStep, read_failure
from .step import choose_precision, compute_losses, loss_weight, seed_step


@dataclass
class ReplayReport:
    """The result of a replay, which ``str`` formats.

    Attributes:
        losses: losses of the last micro-batch.
        error: the exception that the step raised, if any.
        first_module: name and class of the first module with an output that is not finite.
        first_module_values: how many of its output values are not finite, and whether its inputs
            and weights are.
        not_finite: names of tensors: "weights" before the step, "buffers" after it, "gradients".
        images: for each image a description, and its losses when the model runs on it alone.
    """

    path: str
    failed: FailedStep
    device: str
    losses: dict[str, float] = field(default_factory=dict)
    error: str = ""
    first_module: str | None = None
    first_module_values: str = ""
    not_finite: dict[str, list[str]] = field(default_factory=dict)
    images: list[tuple[str, dict[str, float]]] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether the losses equal those of training up to float32 rounding."""
        before = self.failed.losses
        return before.keys() == self.losses.keys() and all(
            math.isclose(value, before[name], rel_tol=1e-5)
            or (math.isnan(value) and math.isnan(before[name]))
            for name, value in self.losses.items()
        )

    def __str__(self) -> str:
        failed = self.failed
        lines = [
            f"{self.path}: step {failed.iteration}, process {failed.rank} of "
            f"{failed.num_processes}, seed {failed.seed}; failed on {failed.device}, replayed on "
            f"{self.device}",
            "",
            f"{'loss':<20}  {'training':>11}  {'replay':>11}",
        ]
        for name in {**failed.losses, **self.losses}:
            values = (found.get(name, math.nan) for found in (failed.losses, self.losses))
            lines.append(f"{name:<20}  " + "  ".join(f"{value:>11.5g}" for value in values))
        if not self.is_same:
            lines.append("The losses differ: the device, a library or other processes differ.")
        lines.append("")
        if self.error:
            lines.append(f"The step raised {self.error}")
        if self.first_module is None:
            lines.append("Every module's output is finite.")
        else:
            found = f"{self.first_module}, {self.first_module_values}"
            lines.append(f"First output that is not finite: {found}.")
        for kind, names in self.not_finite.items():
            found = f"not finite: {join_first(names)}" if names else "all finite"
            lines.append(f"{kind:<15} {found}")
        lines += ["", "Images of this process, each run alone:"]
        for line, losses in self.images:
            lines.append(f"  {line}" + (f", loss {sum(losses.values()):.5g}" if losses else ""))
        return "\n".join(lines)


def replay_failure(path: str | os.PathLike[str]) -> ReplayReport:
    """Restores the model and the random state of a failed step, and runs the step again.

    Raises:
        UserError: the file cannot be read, or its weights do not fit its config.
    """
    failed = read_failure(path)
    cfg = load_embedded_config(failed.config, f"the config inside '{path}'")
    cfg.MODEL.DEVICE = failed.device if torch.cuda.is_available() else "cpu"
    model = _build_model(cfg, failed, path)
    report = ReplayReport(path=str(path), failed=failed, device=cfg.MODEL.DEVICE)
    state = {**failed.weights, **failed.buffers}
    parameters = {name for name, _ in model.named_parameters()}
    report.not_finite = {
        "weights": _not_finite({k: v for k, v in state.items() if k in parameters}),
        "buffers": _not_finite({k: v for k, v in state.items() if k not in parameters}),
    }
    with EventStorage(failed.iteration):  # Detectron2's detectors write to it in training
        _run_step(cfg, model, failed, report)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        report.not_finite["gradients"] = _not_finite(gradients)
        for entry in (entry for batch in failed.batches for entry in batch):
            _restore(model, failed)  # each forward pass changes BatchNorm's statistics
            seed_step(failed.seed, failed.iteration, failed.rank)
            line, losses = _describe_image(entry), {}
            try:
                with torch.no_grad():
                    alone = compute_losses(model, [entry], precision=choose_precision(cfg))
                losses = {name: float(value) for name, value in alone.items()}
            except Exception as error:
                line = f"{line}; raised {type(error).__name__}: {error}"
            report.images.append((line, losses))
    return report


def _build_model(cfg: CfgNode, failed: FailedStep, path: str | os.PathLike[str]) -> nn.Module:
    with refuse_bad_values(f"the record '{path}'"):
        model: nn.Module = build_model(cfg)
        model = model.to(memory_format=find_memory_format(cfg))  # another one rounds differently
        cached = replace_encoder(cfg, model) if cfg.MODEL.CACHE_FEATURES.ENABLED else None
        _restore(model, failed)
    if cached is not None:
        cached.trust()  # the entries of the batch contain their features
    return model.train()


def _restore(model: nn.Module, failed: FailedStep) -> None:
    model.load_state_dict(failed.weights)
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, kept in failed.buffers.items():
            if name in buffers and buffers[name].shape == kept.shape:
                buffers[name].copy_(kept)


def _run_step(cfg: CfgNode, model: nn.Module, failed: FailedStep, report: ReplayReport) -> None:
    """Runs all micro-batches forward and backward, and fills the report."""
    seed_step(failed.seed, failed.iteration, failed.rank)
    model.zero_grad()
    normalizers = () if failed.normalizers is None else (failed.normalizers.to(cfg.MODEL.DEVICE),)
    try:
        with _watch_modules(model, report):
            for batch in failed.batches:
                losses = compute_losses(model, batch, normalizers, precision=choose_precision(cfg))
                weight = loss_weight(
                    model,
                    batch,
                    micro_batches=cfg.SOLVER.ACCUMULATE,
                    processes=failed.num_processes,
                    batch_size=cfg.SOLVER.IMS_PER_BATCH,
                )
                losses = {name: loss * weight for name, loss in losses.items()}
                report.losses = {name: float(value.detach()) for name, value in losses.items()}
                (torch.stack(list(losses.values())).sum() * failed.scale).backward()
    except Exception as error:  # any error is part of the report
        report.error = f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _watch_modules(model: nn.Module, report: ReplayReport) -> Iterator[None]:
    """Records the first module that returns a value that is not finite; children come first."""
    handles: list[RemovableHandle] = []

    def watch(name: str, module: nn.Module) -> None:
        def check(_: nn.Module, inputs: Any, output: Any) -> None:
            bad, total = _count(output)
            if report.first_module is not None or not bad:
                return
            finite = [f"finite inputs: {not _count(inputs)[0]}"]
            finite.append(f"finite weights: {not _count(list(module.parameters()))[0]}")
            report.first_module = f"{name or 'the model itself'} ({type(module).__name__})"
            report.first_module_values = f"{bad:,} of {total:,} values; {', '.join(finite)}"

        handles.append(module.register_forward_hook(check))

    # A hook on a frozen norm would prevent its folding into the convolution, unlike in training.
    folded = {
        module.norm
        for module in model.modules()
        if isinstance(module, NormedConv2d) and isinstance(module.norm, FrozenBatchNorm2d)
    }
    for name, module in model.named_modules():
        if module not in folded:
            watch(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _describe_image(entry: Mapping[str, Any]) -> str:
    """Returns one line about an image of the batch."""
    image, instances = entry.get("image"), entry.get("instances")
    shape = image.shape[-2:] if isinstance(image, Tensor) else ()
    size = " x ".join(str(length) for length in reversed(shape))
    identity = f" (id {entry['image_id']})" if "image_id" in entry else ""
    line = f"{entry.get('file_name', 'an image without a file name')}{identity}  {size}"
    if instances is None:
        return line
    line += f", {len(instances)} boxes"
    if instances.has("gt_boxes") and not instances.gt_boxes.nonempty().all():
        line += ", of which some have no area"
    return line


def _not_finite(tensors: Mapping[str, Tensor | None]) -> list[str]:
    return [name for name, tensor in tensors.items() if _count(tensor)[0]]


def _count(value: Any) -> tuple[int, int]:
    """Returns how many floating-point values in nested data are not finite, and how many exist."""
    tensors = _floating_tensors(value)
    bad = sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors)
    return bad, sum(tensor.numel() for tensor in tensors)


def _floating_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        is_counted = value.is_floating_point() or value.is_complex()
        return [value.detach()] if is_counted else []
    if isinstance(value, Instances | ImageList | Boxes) or dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [tensor for element in value for tensor in _floating_tensors(element)]

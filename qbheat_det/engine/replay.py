# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs a failed step again and says where the first value that is not finite came from."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_model
from detectron2.structures import ImageList, Instances
from detectron2.utils.events import EventStorage
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qbheat_det.checkpoint import load_embedded_config
from qbheat_det.config import find_memory_format
from qbheat_det.core.errors import UserError
from qbheat_det.engine.cacheable import replace_encoder
from qbheat_det.engine.step import seed_step
from qbheat_det.layers import NormedConv2d
from qbheat_det.modeling.contracts import SupportsLossNormalizers

from .device_batches import BatchedInputs
from .failure import FailedStep, read_failure
from .replay_report import ImageReport, ReplayReport, describe_image
from .step import choose_precision, compute_losses, loss_weight


def replay_failure(
    path: str | os.PathLike[str], *, device: str | None = None, each_image: bool = True
) -> ReplayReport:
    """Builds the model of a failed step, restores weights and randomness, and runs it again.

    Args:
        path: file that ``dump_failure`` wrote. Nothing in it is run.
        device: "cpu" or "cuda"; None takes the one the step failed on, where there is one.
        each_image: also compute the losses of each image alone, without gradients.

    Raises:
        UserError: the file cannot be read, or its config builds no model that takes its weights.
    """
    failed = read_failure(path)
    cfg = load_embedded_config(failed.config, f"the config inside '{path}'")
    wanted = device or failed.device
    cfg.MODEL.DEVICE = wanted if wanted == "cpu" or torch.cuda.is_available() else "cpu"
    model = _build_model(cfg, failed, path)
    bad = _not_finite({**failed.weights, **failed.buffers})
    report = ReplayReport(
        path=str(path),
        failed=failed,
        device=cfg.MODEL.DEVICE,
        bad_weights=[name for name in bad if name in failed.gradients],
        bad_buffers=[name for name in bad if name not in failed.gradients],
        bad_last_gradients=_not_finite(failed.gradients),
    )
    with EventStorage(failed.iteration):  # which Detectron2's detectors write to in training
        _check_normalizers(model, failed, path)
        _run_step(cfg, model, failed, report)
        report.bad_gradients = _not_finite({name: p.grad for name, p in model.named_parameters()})
        _restore(model, failed)  # the forward pass moved the statistics of BatchNorm
        report.images = [
            _report_image(cfg, model, failed, entry, run=each_image)
            for batch in failed.batches
            for entry in batch
        ]
    return report


def _build_model(cfg: CfgNode, failed: FailedStep, path: str | os.PathLike[str]) -> nn.Module:
    try:
        model: nn.Module = build_model(cfg)
        model = model.to(memory_format=find_memory_format(cfg))  # another adds in another order
        cached = replace_encoder(cfg, model) if cfg.MODEL.CACHE_FEATURES.ENABLED else None
        _restore(model, failed)
    except (AssertionError, IndexError, KeyError, RuntimeError, ValueError) as error:
        raise UserError(
            f"the model of '{path}' cannot be built again: {error}; the code may have changed, or "
            "a model of your own is not imported"
        ) from error
    if cached is not None:
        cached.trust()  # the images of the step bring their features along
    return model.train()


def _check_normalizers(model: nn.Module, failed: FailedStep, path: str | os.PathLike[str]) -> None:
    """
    Raises:
        UserError: the model divides its losses by other counts than when the step failed.
    """
    if failed.normalizers is None or not isinstance(model, SupportsLossNormalizers):
        return
    wanted = model.loss_counts(failed.batches[0]).shape
    if failed.normalizers.shape != wanted:
        raise UserError(
            f"'{path}' was written by an older qbheat_det, whose losses were divided by counts of "
            f"shape {list(failed.normalizers.shape)} where this one has {list(wanted)}: replay it "
            "with the version that wrote it, which run.json in the run's folder names"
        )


def _restore(model: nn.Module, failed: FailedStep) -> None:
    model.load_state_dict(failed.weights)
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, kept in failed.buffers.items():
            if name in buffers and buffers[name].shape == kept.shape:
                buffers[name].copy_(kept)


def _run_step(cfg: CfgNode, model: nn.Module, failed: FailedStep, report: ReplayReport) -> None:
    """Fills in what the forward and backward passes of all micro-batches show."""
    seed_step(failed.seed, failed.iteration, failed.rank)
    model.zero_grad()
    try:
        with _watched(model, report):
            for batch in failed.batches:
                losses = _losses(cfg, model, batch, failed)
                report.losses = {name: float(value.detach()) for name, value in losses.items()}
                (sum(losses.values()) * failed.scale).backward()  # type: ignore[union-attr]
    except Exception as error:  # what fails here is what the user wants to see, whatever it is
        report.error = f"{type(error).__name__}: {error}"


def _losses(
    cfg: CfgNode, model: nn.Module, batch: BatchedInputs, failed: FailedStep
) -> dict[str, Tensor]:
    """Returns the losses of a micro-batch, weighted as in training."""
    normalizers = () if failed.normalizers is None else (failed.normalizers.to(cfg.MODEL.DEVICE),)
    losses = compute_losses(model, batch, normalizers, precision=choose_precision(cfg))
    weight = loss_weight(
        model,
        batch,
        micro_batches=cfg.SOLVER.ACCUMULATE,
        processes=failed.num_processes,
        batch_size=cfg.SOLVER.IMS_PER_BATCH,
    )
    return {name: loss * weight for name, loss in losses.items()}


@contextlib.contextmanager
def _watched(model: nn.Module, report: ReplayReport) -> Iterator[None]:
    """Notes the first module to return a value that is not finite; children return first."""
    handles: list[RemovableHandle] = []

    def watch(name: str, module: nn.Module) -> None:
        def look(_: nn.Module, inputs: Any, output: Any) -> None:
            if report.first_module is not None:
                return
            bad, total = _count(output)
            if not bad:
                return
            own = {key: p for key, p in module.named_parameters() if not torch.isfinite(p).all()}
            report.first_module = f"{name or 'the model itself'} ({type(module).__name__})"
            report.first_module_values = (bad, total)
            report.first_module_has_finite_inputs = not _count(inputs)[0]
            report.first_module_has_finite_weights = not own

        handles.append(module.register_forward_hook(look))

    # A hook would have a frozen norm take a pass of its own, with other sums than in training.
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


def _report_image(
    cfg: CfgNode, model: nn.Module, failed: FailedStep, entry: dict[str, Any], *, run: bool
) -> ImageReport:
    report = describe_image(entry)
    if not run:
        return report
    seed_step(failed.seed, failed.iteration, failed.rank)
    try:
        with torch.no_grad():
            losses = compute_losses(model, [entry], precision=choose_precision(cfg))
        values = {name: float(value) for name, value in losses.items()}
    except Exception as error:
        return dataclasses.replace(report, error=f"{type(error).__name__}: {error}")
    finally:
        _restore(model, failed)
    return dataclasses.replace(report, losses=values)


def _not_finite(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Names of the tensors with a value that is infinite or not a number."""
    return [name for name, tensor in tensors.items() if _count(tensor)[0]]


def _count(value: Any) -> tuple[int, int]:
    """Returns how many floating-point values of nested data are not finite, and of how many."""
    tensors = list(_floating(value))
    bad = sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors)
    return bad, sum(tensor.numel() for tensor in tensors)


def _floating(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value.detach()
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from _floating(element)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _floating(element)
    elif isinstance(value, Instances):
        yield from _floating(value.get_fields())
    elif isinstance(value, ImageList):
        yield from _floating(value.tensor)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _floating([getattr(value, f.name) for f in dataclasses.fields(value)])

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A trained model in its fastest equal form: the steps, in their order."""

import copy
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.modeling import Backbone
from torch import nn

from qbheat_det.core.environment import keep_freed_memory
from qbheat_det.core.errors import UserError
from qbheat_det.layers.quick_blocks import quicken_blocks
from qbheat_det.modeling.contracts import masks_padding

from .compiled_call import CompiledCall, find_fault
from .compiled_part import CompiledForward
from .folding import fold_batch_norms
from .part_forwards import autocast_all, replace_forward, restore_forwards
from .part_programs import MOST_COMPILED, PartPrograms, Plan, first_line
from .precision import choose_precision
from .program import require_compiler
from .program_cache import ProgramCache
from .report import DeployReport
from .samples import call, find_parts, input_size
from .settings import COMPILE_AFTER, Settings, tell_on_stderr


class Deployed:
    """What a deployed model is besides its class: for prediction alone.

    Attributes:
        report: what was done, and what was not and why.
    """

    report: DeployReport

    def train(self, mode: bool = True) -> Any:
        """Stays in evaluation mode.

        Raises:
            UserError: training is asked for.
        """
        if mode:
            raise UserError(
                "a deployed model does not train: its BatchNorms are folded and its programs hold "
                "the weights. Train the model that it was made of, and deploy it again"
            )
        return super().train(False)  # type: ignore[misc]

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Refuses.

        Raises:
            UserError: always.
        """
        raise UserError(
            "a deployed model takes no other weights: its programs hold the ones that it was made "
            "with. Load them into the plain model, and deploy that"
        )

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As the model's own, without gradients."""
        own: Callable[..., Any] = super().forward  # type: ignore[misc]
        inputs = arguments[0] if len(arguments) == 1 and not keywords else None
        with torch.no_grad():
            if getattr(self, "_records_graphs", False):  # the last call's results were taken
                torch.compiler.cudagraph_mark_step_begin()
            # Such a model gives for a padded batch what its images give alone: so they go alone.
            alone = masks_padding(self)
            if (
                alone
                and isinstance(inputs, list)
                and len({tuple(entry["image"].shape) for entry in inputs}) > 1
            ):
                return [own([entry])[0] for entry in inputs]
            return own(*arguments, **keywords)


def deploy(
    model: nn.Module,
    *,
    precision: str = "float32",
    compile: str = "auto",
    image_sizes: Sequence[Sequence[int]] = (),
    compile_after: int = COMPILE_AFTER,
    keep_memory: bool = True,
    cache_folder: str | Path | None = None,
    tell: Callable[[str], None] = tell_on_stderr,
) -> nn.Module:
    """Returns a copy of a trained model in its fastest equal form on the model's device.

    It has the model's class and is called as the model is, with images of any size. BatchNorm is
    folded, maps are channels-last, and for image sizes that are asked for or come often backbone
    and head are compiled; ``report`` says of each step whether it applied. Compiling takes minutes
    once, later processes load what was compiled then. In float32 scores differ from the model's by
    less than 0.001 and boxes by less than 0.1 pixel.

    Args:
        model: a detector, classifier or backbone, with its weights, on its device. Not changed.
        precision: "float32" or, for devices that multiply it, "bfloat16", which is not equal:
            AP moves by some tenths (docs/fast.md).
        compile: "auto", or "off" for the steps that need no compiler.
        image_sizes: (height, width) in pixels of images as the model gets them, for which it is
            compiled now: an image of each is run. On CUDA, all there are, which get graphs.
        compile_after: images of one size in this process after which it is compiled for that size;
            0 is never. On CUDA not used.
        keep_memory: keep what is freed after an image for the next one. It holds for the whole
            process, whose memory then does not shrink (glibc).
        cache_folder: of compiled programs; by default "programs" in ``$QBHEAT_CACHE``.
        tell: takes a line for the user, as of what is compiled and how long it takes.

    Raises:
        UserError: an argument is none of those named, the model has no backbone, or it does not
            take an image of ``image_sizes``.
    """
    settings = Settings(
        precision=precision,
        compile=compile,
        image_sizes=image_sizes,
        compile_after=compile_after,
        keep_memory=keep_memory,
        cache_folder=cache_folder,
        tell=tell,
    )
    find_parts(model)  # raises
    device = next(model.parameters()).device
    dtype, reason = choose_precision(precision, device)
    deployed = _copy(model)
    report = DeployReport()
    _fold(deployed, report)
    deployed.to(memory_format=torch.channels_last)
    report.add("channels-last", True, "weights and maps have their channels innermost")
    _keep_memory(settings.keep_memory, device, report)
    report.add("precision", dtype != torch.float32, f"{str(dtype).split('.')[1]}: {reason}")
    _compile(deployed, settings, dtype, report)
    setattr(deployed, "report", report)  # noqa: B010  which nn.Module's types refuse
    return deployed


def _copy(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    twin.__dict__.pop("forward", None)  # of the key, see predictor_key.py
    restore_forwards(twin)  # it may be deployed, or be a part of what is
    twin.__dict__.pop("_records_graphs", None)
    twin.eval()
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
    if not isinstance(twin, Deployed):
        own = type(twin)
        twin.__class__ = type(own.__name__, (Deployed, own), {"__module__": own.__module__})
    return twin


def _fold(model: nn.Module, report: DeployReport) -> None:
    folded, left = fold_batch_norms(model)
    what = f"{folded} BatchNorms are part of the convolutions before them"
    if left:
        what += f"; {left} follow no convolution directly and stay"
    again = isinstance(model, Deployed) and hasattr(model, "report")
    none = "done when it was deployed before" if again else "there is no BatchNorm"
    report.add("fold", folded > 0, what if folded or left else none)
    quick = quicken_blocks(model) if next(model.parameters()).device.type == "cpu" else 0
    none = "done when it was deployed before" if again else "none is known"
    told = f"{quick} pass over an image's maps less often" if quick else none
    report.add("blocks", quick > 0, told)


def _keep_memory(asked: bool, device: torch.device, report: DeployReport) -> None:
    kept = asked and device.type == "cpu" and keep_freed_memory()
    why_not = "only with glibc, on the CPU" if asked else "not asked for"
    told = "freed memory stays with this process for the next image" if kept else why_not
    report.add("memory", kept, told)


def _compile(
    model: nn.Module, settings: Settings, dtype: torch.dtype, report: DeployReport
) -> None:
    device = next(model.parameters()).device
    parts = find_parts(model)
    if settings.compile == "off":
        report.add("compile", False, "not asked for")
        autocast_all(parts, dtype, device)
    elif device.type == "cuda":
        _compile_for_cuda(model, parts, settings, dtype, report)
    else:
        _compile_for_cpu(model, parts, settings, dtype, report)


def _compile_for_cuda(
    model: nn.Module,
    parts: dict[str, nn.Module],
    settings: Settings,
    dtype: torch.dtype,
    report: DeployReport,
) -> None:
    device = next(model.parameters()).device
    autocast_all(parts, dtype, device)
    fault = find_fault(device)
    if fault:
        report.add("compile", False, f"PyTorch compiles nothing here: {fault}")
        if settings.image_sizes:
            settings.tell(f"nothing is compiled: {fault}")
        return
    # What a graph returns is overwritten by its next run: a model reads it before, others may not.
    graphs = bool(settings.image_sizes) and not isinstance(model, Backbone)
    calls = {
        name: CompiledCall(
            part.forward,
            functools.partial(_give_up, name, report),
            dynamic=not settings.image_sizes,
            mode="reduce-overhead" if graphs else None,
        )
        for name, part in parts.items()
    }
    for name, part in parts.items():
        replace_forward(part, calls[name])
    model._records_graphs = graphs  # type: ignore[assignment]
    when = "for the sizes asked for" if settings.image_sizes else "at the first image"
    settings.tell(f"compiling {' and '.join(parts)} {when}: a minute or several")
    start = time.perf_counter()
    _run_sizes(model, settings)
    if settings.image_sizes:
        when += f", in {time.perf_counter() - start:.0f} s"
        settings.tell(f"compiled {when}")
    compiled = [name for name, call in calls.items() if not call.has_failed]
    if compiled:
        report.add("compile", True, f"{' and '.join(compiled)}, with torch.compile {when}")
    why_not = "a backbone's maps would be overwritten" if settings.image_sizes else "sizes vary"
    report.add("CUDA graphs", graphs, "one for each image size" if graphs else why_not)


def _give_up(name: str, report: DeployReport, reason: str) -> None:
    report.add("compile", False, f"{name} runs as it is, PyTorch cannot compile it: {reason}")


def _compile_for_cpu(
    model: nn.Module,
    parts: dict[str, nn.Module],
    settings: Settings,
    dtype: torch.dtype,
    report: DeployReport,
) -> None:
    own = {name: part.forward for name, part in parts.items()}
    autocast_all(parts, dtype, next(model.parameters()).device)
    try:
        cache = ProgramCache(Path(settings.cache_folder) if settings.cache_folder else None)
    except UserError as error:
        report.add("compile", False, str(error))
        if settings.image_sizes:
            settings.tell(f"nothing is compiled: {error}")
        return
    after, sentence = settings.compile_after, f"programs of one size each, from {cache.folder}"
    try:
        require_compiler()
        if after:
            sentence += f"; a size that has come {after} times is compiled, {MOST_COMPILED} at most"
    except UserError as error:
        after, sentence = 0, f"{sentence}; none can be made: {error}"
    report.add("compile", True, sentence)
    plan = Plan(cache, after, settings.tell, report)
    for name, part in parts.items():
        programs = PartPrograms(part, name, dtype, own[name], part.forward, plan)
        replace_forward(part, CompiledForward(programs))
    plan.asks = True
    _run_sizes(model, settings)
    plan.asks = False


def _run_sizes(model: nn.Module, settings: Settings) -> None:
    """Runs an image of each size that was asked for, which compiles for it."""
    for size in settings.image_sizes:
        try:
            call(model, input_size(model, size))
        except Exception as error:
            height, width = size
            raise UserError(
                f"the model does not take an image of {height}x{width} pixels, for which it was to "
                f"be compiled: {first_line(error)}"
            ) from error

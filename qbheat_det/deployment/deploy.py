# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A trained model in its fastest equal form: the steps, in their order."""

import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.modeling import Backbone
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from qbheat_det.errors import UserError

from .compiled_part import CompiledForward, find_batch_axes
from .folding import fold_batch_norms
from .memory import keep_freed_memory
from .precision import choose_precision
from .program import MOST_PIXELS, InPrecision, load_program, make_sample
from .program_cache import ProgramCache
from .report import DeployReport
from .samples import (
    OTHER_SIZE,
    SAMPLE_SIZE,
    capture,
    find_parts,
    image_side,
    sample_size,
    size_step,
)

COMPILE = ("auto", "off")
# Largest distance from the plain form, relative to an output's largest value.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}


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
            alone = getattr(self, "_masks_padding", False)
            if (
                alone
                and isinstance(inputs, list)
                and len({tuple(entry["image"].shape) for entry in inputs}) > 1
            ):
                return [own([entry])[0] for entry in inputs]
            return own(*arguments, **keywords)


@dataclass(frozen=True)
class Settings:
    """How to deploy; see ``deploy``."""

    precision: str
    compile: str
    image_size: tuple[int, int] | None
    cache_folder: Path | None
    tell: Callable[[str], None]


def tell_on_stderr(line: str) -> None:
    """Prints a line where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)


def deploy(
    model: nn.Module,
    *,
    precision: str = "auto",
    compile: str = "auto",
    image_size: Sequence[int] | None = None,
    keep_memory: bool = True,
    cache_folder: str | Path | None = None,
    tell: Callable[[str], None] = tell_on_stderr,
) -> nn.Module:
    """Returns a copy of a trained model in its fastest equal form on the model's device.

    It has the model's class and is called as the model is. BatchNorm is folded, maps are
    channels-last, backbone and head are compiled; ``report`` says of each step whether it applied.
    The first time on a machine takes minutes, later processes load what was compiled then. In
    float32 scores differ from the model's by less than 0.001 and boxes by less than 0.1 pixel.

    Args:
        model: a detector, classifier or backbone, with its weights, on its device. Not changed.
        precision: "float32", "bfloat16", or "auto": bfloat16 where the device multiplies it.
        compile: "auto", or "off" for the steps that need no compiler.
        image_size: (height, width) in pixels where all images have one size; for CUDA graphs.
        keep_memory: keep what is freed after an image for the next one. It holds for the whole
            process, whose memory then does not shrink (glibc).
        cache_folder: of compiled programs; by default "programs" in ``$QBHEAT_CACHE``.
        tell: takes a line for the user, as of what is compiled and how long it takes.

    Raises:
        UserError: an argument is none of those named, or the model has no backbone.
    """
    if compile not in COMPILE:
        raise UserError(f"compile is one of {', '.join(COMPILE)}, not '{compile}'")
    settings = Settings(
        precision=precision,
        compile=compile,
        image_size=None if not image_size else (int(image_size[0]), int(image_size[1])),
        cache_folder=None if cache_folder is None else Path(cache_folder),
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
    kept = keep_memory and device.type == "cpu" and keep_freed_memory()
    report.add(
        "memory",
        kept,
        "freed memory stays with this process for the next image"
        if kept
        else ("not asked for" if not keep_memory else "only with glibc, on the CPU"),
    )
    report.add("precision", dtype != torch.float32, f"{str(dtype).split('.')[1]}: {reason}")
    _compile(deployed, settings, dtype, report)
    setattr(deployed, "report", report)  # noqa: B010  which nn.Module's types refuse
    return deployed


def _copy(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    twin.__dict__.pop("forward", None)  # of the key, see predictor_key.py
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
    report.add("fold", folded > 0, what if folded or left else "there is no BatchNorm")


def _compile(
    model: nn.Module, settings: Settings, dtype: torch.dtype, report: DeployReport
) -> None:
    device = next(model.parameters()).device
    parts = find_parts(model)
    if settings.compile == "off":
        report.add("compile", False, "not asked for")
        _autocast_all(parts, dtype, device)
    elif device.type == "cuda":
        _compile_for_cuda(model, parts, settings, dtype, report)
    else:
        _compile_for_cpu(model, parts, settings, dtype, report)


def _autocast_all(parts: dict[str, nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    for part in parts.values():
        _autocast(part, dtype, device)


def _autocast(part: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Has a part compute in bfloat16 without being compiled."""
    if dtype != torch.float32:
        part.forward = InPrecision(_Shell(part.forward), dtype, device).forward


class _Shell(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def _compile_for_cuda(
    model: nn.Module,
    parts: dict[str, nn.Module],
    settings: Settings,
    dtype: torch.dtype,
    report: DeployReport,
) -> None:
    # What a graph returns is overwritten by its next run: a model reads it before, others may not.
    graphs = settings.image_size is not None and not isinstance(model, Backbone)
    for part in parts.values():
        _autocast(part, dtype, next(part.parameters()).device)
        part.forward = torch.compile(
            part.forward,
            dynamic=None if settings.image_size else True,
            mode="reduce-overhead" if graphs else None,
        )
    model._records_graphs = graphs  # type: ignore[assignment]
    report.add("compile", True, f"{' and '.join(parts)}, with torch.compile at the first image")
    missing = "a backbone's maps would be overwritten" if settings.image_size else "sizes vary"
    report.add("CUDA graphs", graphs, "one for the image size" if graphs else missing)


def _compile_for_cpu(
    model: nn.Module,
    parts: dict[str, nn.Module],
    settings: Settings,
    dtype: torch.dtype,
    report: DeployReport,
) -> None:
    fixed = image_side(model) is not None
    device = next(model.parameters()).device
    sizes = [sample_size(model, size) for size in (SAMPLE_SIZE, OTHER_SIZE)]
    try:
        cache = ProgramCache(settings.cache_folder)
        samples = [capture(model, parts, size) for size in sizes[: 1 if fixed else 2]]
    except UserError as error:
        report.add("compile", False, str(error))
        _autocast_all(parts, dtype, device)
        return
    done: list[str] = []
    failed: list[str] = []
    start = time.perf_counter()
    for name, part in parts.items():
        try:
            if not all(name in sample for sample in samples):
                raise UserError("it is not called once an image, with tensors alone")
            step = 0 if part is not parts["backbone"] else size_step(model)
            sample = make_sample(samples[0][name], image_side=min(sizes[0]), step=step, fixed=fixed)
            program = load_program(
                InPrecision(part, dtype, device),
                sample,
                name=name,
                cache=cache,
                check=_checker(part, [found[name] for found in samples], dtype),
                tell=settings.tell,
            )
            part.forward = CompiledForward(
                plain=part.forward,
                program=program,
                sample=sample,
                batch_axes=find_batch_axes(part, samples[-1][name]),
                tell=settings.tell,
                name=name,
            )
            done.append(name)
        except Exception as error:  # of PyTorch's many kinds: each leaves the plain form
            failed.append(f"{name} is not: {_first_line(error)}")
            _autocast(part, dtype, device)
    seconds = time.perf_counter() - start
    sizes_told = "one image size" if fixed else f"images of any size up to {MOST_PIXELS} pixels"
    sentences = [f"{' and '.join(done)} for {sizes_told}, in {seconds:.1f} s ({cache.folder})"]
    report.add("compile", bool(done), "; ".join((sentences if done else []) + failed))


@torch.no_grad()
def _checker(
    part: nn.Module, samples: Sequence[tuple[Any, ...]], dtype: torch.dtype
) -> Callable[[Callable[..., Any]], None]:
    def check(program: Callable[..., Any]) -> None:
        with torch.no_grad():
            for arguments in samples:
                wanted, _ = tree_flatten(part(*arguments))
                found, _ = tree_flatten(program(*arguments))
                for a, b in zip(found, wanted, strict=True):
                    if isinstance(b, Tensor):
                        distance = float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
                        if not distance <= _TOLERANCE[dtype]:
                            raise RuntimeError(
                                f"its outputs differ from the plain ones by {distance:.1g} of the "
                                "largest"
                            )

    return check


def _first_line(error: Exception) -> str:
    text = " ".join((str(error) or type(error).__name__).split("\n\n", 1)[0].split())
    return text if len(text) < 300 else f"{text[:300]} …"

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The forms in which a detector is measured: as it is built, and the fastest equal one.

eager      as it is built
compiled   a peer's best: channels last, ``torch.compile`` for the one size, weights frozen into the
           graph, which folds BatchNorm; on a GPU with CUDA graphs
deployed   ours: what ``qbheat_det.deploy`` makes of it
"""

import functools
import time
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.detectors import DETECTORS, Forward

EAGER, COMPILED, DEPLOYED = "eager", "compiled", "deploy"


@functools.cache
def build(
    name: str,
    form: str,
    *,
    quick: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Forward:
    """Builds a detector in a form; one process builds each once, for compiling takes minutes.

    Args:
        name: of ``DETECTORS``.
        form: "eager", "compiled" or "deploy".
        quick: nothing is compiled by a C++ compiler.
        device: where it runs.
        dtype: of weights and images; a deployed detector chooses its own.
    """
    detector = DETECTORS[name]
    torch.manual_seed(0)
    model = detector.load()().to(device)
    if form == DEPLOYED:
        from qbheat_det import deploy

        fast = deploy(model, compile="off" if quick else "auto")
        print(f"{detector.title}, deployed:\n{fast.report}")
        return partial(detector.call, fast)
    model = model.to(dtype)
    if form == COMPILED:
        model = compile_peer(model, quick=quick)
    if dtype == torch.float32:
        return partial(detector.call, model)
    return lambda images: detector.call(model, images.to(dtype))


def compile_peer(model: nn.Module, *, quick: bool = False) -> nn.Module:
    """Returns the fastest form that PyTorch has for a model on images of one size."""
    model = model.to(memory_format=torch.channels_last)
    on_gpu = next(model.parameters()).is_cuda
    options: dict[str, str | int | bool | Tensor] = {"freezing": True}
    if on_gpu:
        options["triton.cudagraphs"] = True
    backend = "eager" if quick else "inductor"
    compiled: nn.Module = torch.compile(
        model, dynamic=False, backend=backend, options=None if quick else options
    )
    return compiled


def first_call(name: str, form: str, forward: Forward, images: Tensor) -> float:
    """Makes the call that compiles, says how long it took, and returns these seconds."""
    start = time.perf_counter()
    forward(images)
    seconds = time.perf_counter() - start
    if form != EAGER:
        print(f"  {DETECTORS[name].title}, {form}: first call {seconds:.1f} s", flush=True)
    return seconds

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The forms in which a detector is measured.

eager     the model as it is built
compiled  peers: channels-last, ``torch.compile`` for one size; CUDA graphs on a GPU
frozen    like "compiled", with constant weights, which folds BatchNorm; can be faster or slower
deploy    ours: the output of ``qbheat_det.deploy``
RUNTIME:PATH  an exported file, see ``exported_file.py``

All use float32, except on GPUs. There, peers use bfloat16 for weights and images, ours by autocast.

Run as a program with NAME FORM HEIGHT WIDTH THREADS QUICK, it makes forward passes on request; see
``workers.py``. Its first answer has the seconds until the ``first`` result and the ``report`` of a
deployed model. Later answers have the ``seconds`` of a forward pass.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import exported_file
from benchmarks.detectors import DETECTORS, Forward, random_images
from benchmarks.timing import set_threads
from benchmarks.workers import Worker, open_answers, said, started

EAGER = "eager"
COMPILED = "compiled"
FROZEN = "frozen"
DEPLOYED = "deploy"


@functools.cache
def build(
    name: str,
    form: str,
    *,
    quick: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Forward:
    """Builds one of ``DETECTORS`` in a form; cached per process, as compiling takes minutes.

    With ``quick``, no C++ compiler is called.
    """
    detector = DETECTORS[name]
    torch.manual_seed(0)
    model = detector.load()().to(device)
    if form == DEPLOYED:
        from qbheat_det import deploy

        fast = deploy(model, precision=str(dtype).removeprefix("torch."))
        return partial(detector.call, fast)
    model = model.to(dtype)
    if form in (COMPILED, FROZEN):
        model = compile_peer(model, frozen=form == FROZEN, quick=quick)
    if dtype == torch.float32:
        return partial(detector.call, model)
    return lambda images: detector.call(model, images.to(dtype))


def compile_peer(model: nn.Module, *, frozen: bool = False, quick: bool = False) -> nn.Module:
    """Returns a model compiled for images of one size."""
    model = model.to(memory_format=torch.channels_last)
    on_gpu = next(model.parameters()).is_cuda
    backend = "eager" if quick else "inductor"
    options: dict[str, bool] | None = None
    if not quick:
        options = {"freezing": frozen, "triton.cudagraphs": on_gpu}
    compiled: nn.Module = torch.compile(model, dynamic=False, backend=backend, options=options)
    return compiled


def report_of(forward: Forward) -> str:
    """Returns the report of ``deploy``; "" for other forms."""
    model = forward.args[0] if isinstance(forward, partial) else None
    return str(getattr(model, "report", ""))


class Forwards:
    """Forward passes of detectors in several forms, each in its own running process."""

    def __init__(
        self,
        contenders: Iterable[tuple[str, str]],
        height: int,
        width: int,
        *,
        threads: int,
        quick: bool,
    ) -> None:
        self.calls: dict[tuple[str, str], Callable[[], float]] = {}
        self._stack = ExitStack()
        numbers = [str(number) for number in (height, width, threads, int(quick))]
        for name, form in contenders:
            runtime, _, path = form.partition(":")
            command = [__file__, name, form, *numbers]
            if path:
                command = [exported_file.__file__, runtime, path, str(threads)]
            with said(f"{name}, {form}"):
                worker, ready = self._stack.enter_context(started(command))
                self.calls[name, form] = partial(_seconds, worker)
                if form != EAGER and not path:
                    print(f"  {DETECTORS[name].title}, {form}: first call {ready['first']:.1f} s")
                    print("".join(f"    {line}\n" for line in ready["report"].splitlines()), end="")

    def __enter__(self) -> dict[tuple[str, str], Callable[[], float]]:
        """Returns functions that run a forward pass and return its duration in seconds."""
        return self.calls

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _seconds(worker: Worker) -> float:
    return float(worker()["seconds"])


def main() -> None:
    """Builds the detector, and answers requests until standard input ends."""
    name, form, *numbers = sys.argv[1:]
    height, width, threads, quick = (int(number) for number in numbers)
    answer = open_answers()
    try:
        set_threads(threads)
        images = random_images(height, width)
        with torch.inference_mode():
            start = time.perf_counter()
            forward = build(name, form, quick=bool(quick))
            forward(images)
            answer({"first": time.perf_counter() - start, "report": report_of(forward)})
            for _ in sys.stdin:
                start = time.perf_counter()
                forward(images)
                answer({"seconds": time.perf_counter() - start})
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Measures time, memory and multiply-adds of pre-training models, and a large matrix product."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.pretraining_contenders import CONTENDERS, Calls, Setting, build, prepare
from benchmarks.timing import peak_memory_in_turns, seconds_in_rounds

MATMUL = "matmul"
_ENCODER_ROUNDS = 4
_STEP_ROUNDS = 3


@dataclass(frozen=True)
class Figures:
    """Measurements of one setting; keys of the dicts are names in ``CONTENDERS``.

    Attributes:
        batch: images per step.
        encoder_batch: images per call of the encoder.
        encoder: seconds of the encoder's forward and backward pass in each round.
        step: seconds of a step in each round.
        memory: peak MiB of a step.
        madds: multiply-adds per image in the forward pass: of the encoder, and of the whole model.
    """

    batch: int
    encoder_batch: int
    encoder: dict[str, list[float]]
    step: dict[str, list[float]]
    memory: dict[str, float]
    madds: dict[str, tuple[int, int]]


def measure_setting(
    setting: Setting,
    models: Sequence[str],
    *,
    batch: int,
    encoder_batch: int,
    rounds: int | None,
    threads: int,
    device: torch.device,
) -> Figures:
    """Measures all ``models`` in turns."""
    with_step = [model for model in models if CONTENDERS[model].method != "whole"]
    madds = {model: count(model, setting) for model in with_step}
    calls: dict[str, Calls] = {}
    on_gpu = device.type == "cuda"
    memory: dict[str, float] = {}
    if not on_gpu:
        memory = memory_of_processes(setting, with_step, batch, threads)
    for model in models:
        make = partial(
            prepare,
            CONTENDERS[model],
            setting,
            batch=batch,
            device=device,
            encoder_batch=encoder_batch,
        )
        if on_gpu:
            calls[model], memory[model] = peak_on_gpu(make, device)
        else:
            calls[model] = make()
    clock = partial(synchronised_clock, device)
    encoder = seconds_in_rounds(
        {model: calls[model].encoder for model in models},
        rounds=rounds or _ENCODER_ROUNDS,
        clock=clock,
    )
    steps: dict[str, Callable[[], object]] = {model: calls[model].step for model in with_step}
    step = seconds_in_rounds(steps, rounds=rounds or _STEP_ROUNDS, clock=clock)
    return Figures(batch, encoder_batch, encoder, step, memory, madds)


def count(model: str, setting: Setting) -> tuple[int, int]:
    """Returns the multiply-adds of the encoder and of the whole model, for one image."""
    from qbheat_det.evaluation.complexity import CountingRule, count_detector_madds

    counts = count_detector_madds(build(CONTENDERS[model], setting), setting.size, setting.size)
    encoder = "encoder"
    if CONTENDERS[model].method == "quarter":
        encoder = "backbone"
    return counts.total(CountingRule.CORE, encoder), counts.total(CountingRule.CORE)


def memory_of_processes(
    setting: Setting, models: Sequence[str], batch: int, threads: int
) -> dict[str, float]:
    """Returns the peak MiB of two steps on the CPU, each model in a fresh process."""
    arguments = [setting.name, *(str(number) for number in (setting.size, batch, threads))]
    program = ["-m", "benchmarks.pretraining_contenders"]
    commands = {model: [*program, model, *arguments] for model in models}
    samples = peak_memory_in_turns(commands, rounds=1)
    return {model: sample.median for model, sample in samples.items()}


def peak_on_gpu(make: Callable[[], Calls], device: torch.device) -> tuple[Calls, float]:
    """Returns the result of ``make``, and the peak MiB while it is built and runs two steps."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    calls = make()
    for _ in range(2):
        calls.step()
    return calls, (torch.cuda.max_memory_allocated(device) - before) / 2**20


def matrix_product(device: torch.device) -> tuple[Callable[[], object], float]:
    """Returns a function that multiplies large square matrices, and its number of operations."""
    if device.type == "cuda":
        side = 8192
        repeats = 20
        dtype = torch.bfloat16
    else:
        side = 2048
        repeats = 2
        dtype = torch.float32
    left = torch.randn(side, side, device=device, dtype=dtype)
    right = torch.randn(side, side, device=device, dtype=dtype)
    result = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=result)

    return multiply, 2.0 * repeats * side**3


def synchronised_clock(device: torch.device) -> float:
    """Waits until the device has finished, and returns the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

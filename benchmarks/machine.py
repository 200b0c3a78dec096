# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The share of the machine that each model reaches: multiply-adds a second, batch 1.

Beside the forward passes, each in a process of its own and in the same rounds, stand a product of
two large matrices and plain 3 x 3 convolutions of several widths, of which the best counts.
Multiply-adds are those of convolutions, linear layers and attention; what a model does besides
counts as time alone, so the share is what its arithmetic is of what the machine could have done in
that time.
"""

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.detectors import DETECTORS, HEIGHT, WIDTH, call_detectron2, random_images
from benchmarks.forms import COMPILED, DEPLOYED, EAGER, Forwards
from benchmarks.timing import Result, set_threads, told_in_rounds

CONTENDERS = [
    ("285m_211", EAGER),
    ("285m_211", DEPLOYED),
    ("3.7g_522", EAGER),
    ("3.7g_522", DEPLOYED),
    ("detr_r50", EAGER),
    ("detr_r50", COMPILED),
    ("retinanet_r50", EAGER),
]
MATMUL, CONVOLUTION = "matmul", "convolution_3x3"
_ROUNDS = 5
_MATMUL_SIDE = 2048
_CONVOLUTIONS = ((64, 200), (128, 100), (256, 50), (512, 25))  # channels, pixels a side


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Times models, products and convolutions in turns.

    Args:
        quick: a small image, the first model and two rounds, to see that everything runs.
        threads: CPU threads.
    """
    set_threads(threads)
    height, width = (HEIGHT // 4, WIDTH // 4) if quick else (HEIGHT, WIDTH)
    contenders = CONTENDERS[:1] if quick else CONTENDERS
    madds = {name: count(name, height, width) for name in dict.fromkeys(n for n, _ in contenders)}
    with Forwards(contenders, height, width, threads=threads, quick=quick) as forwards:
        calls = {f"{name}_{form}": call for (name, form), call in forwards.items()}
        work = {f"{name}_{form}": madds[name] for name, form in forwards}
        for kind, (call, count_) in yardsticks(quick=quick).items():
            calls[kind], work[kind] = partial(_time, call), count_
        with torch.inference_mode():
            samples = told_in_rounds(calls, rounds=2 if quick else _ROUNDS)
    # The fastest call of each: what the machine can do, and what the model reaches of it.
    rates = {name: work[name] / samples[name].least / 1e9 for name in calls}
    print(f"GMAdds per second at {height}x{width}, batch 1, fastest of the rounds")
    for name, rate in rates.items():
        print(f"  {name:<28} {work[name] / 1e9:8.1f} GMAdds {rate:8.1f} GMAdds/s")
    return rows_of(rates)


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rows_of(rates: Mapping[str, float]) -> list[Result]:
    """Returns each model beside the product and the best convolution; the ratio is the share.

    Args:
        rates: GMAdds per second.
    """
    best = max(rate for name, rate in rates.items() if name.startswith(CONVOLUTION))
    rows = [Result(f"machine/{CONVOLUTION}_vs_{MATMUL}", best, rates[MATMUL], "GMA/s",
                   best / rates[MATMUL])]  # fmt: skip
    for name, rate in rates.items():
        if name == MATMUL or name.startswith(CONVOLUTION):
            continue
        for peer, reached in ((MATMUL, rates[MATMUL]), (CONVOLUTION, best)):
            rows.append(Result(f"machine/{name}_vs_{peer}", rate, reached, "GMA/s", rate / reached))
    return rows


def count(name: str, height: int, width: int) -> int:
    """Returns the multiply-adds of a detector's forward pass on one image."""
    from qbheat_det.analysis.complexity import CountingRule, count_detector_madds, count_madds

    detector = DETECTORS[name]
    model = detector.load()()
    if detector.call is call_detectron2:
        counts = count_detector_madds(model, height, width)
    else:
        counts = count_madds(_LogitsAndBoxes(model), random_images(height, width))
    return counts.total(CountingRule.CORE)


class _LogitsAndBoxes(nn.Module):
    """What the counter needs around a model of transformers, which returns an object."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.model(pixel_values=images)
        return outputs.logits, outputs.pred_boxes


def yardsticks(*, quick: bool = False) -> dict[str, tuple[Callable[[], object], int]]:
    """Returns what shows the machine's rate: by name a call, and its multiply-adds."""
    side = 256 if quick else _MATMUL_SIDE
    left, right, product = (torch.randn(side, side) for _ in range(3))
    found: dict[str, tuple[Callable[[], object], int]] = {
        MATMUL: (partial(torch.mm, left, right, out=product), side**3)
    }
    for channels, pixels in _CONVOLUTIONS[: 1 if quick else None]:
        layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        layer = layer.to(memory_format=torch.channels_last)
        maps = torch.randn(1, channels, pixels, pixels).to(memory_format=torch.channels_last)
        count_ = 9 * channels * channels * pixels * pixels
        found[f"{CONVOLUTION}_{channels}"] = (partial(layer, maps), count_)
    return found

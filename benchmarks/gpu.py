# Copyright (c) qbheat_det contributors. Apache-2.0.
"""On a CUDA GPU, bfloat16: detectors at batch 1 and 32, pre-training, and images from memory.

Detectors  Images per second of ours (deployed and as built) against DETR-R50 at 800x1333, and
           against RT-DETR-R18 and R50 at 640x640. Peers are eager and compiled, with weights and
           images in bfloat16. Images are on the GPU.
QB-Heat    Arithmetic rate of a pre-training step, relative to a bfloat16 matrix product.
Images     The same steps with images in pinned memory, which are copied during the previous step,
           against steps with images on the GPU. Shows the cost of the data path.

Measures nothing without a GPU.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.detectors import HEIGHT, WIDTH, Forward, random_images
from benchmarks.forms import COMPILED, DEPLOYED, EAGER, build
from benchmarks.pretraining_contenders import CONTENDERS, SETTINGS, prepare
from benchmarks.pretraining_figures import MATMUL, count, matrix_product, synchronised_clock
from benchmarks.timing import PairedResult, Result, seconds_in_rounds, set_threads

BATCHES = (1, 32)
GOAL = 0.4  # wanted share of the rate of a matrix product, in pre-training
_ROUNDS = 10
_QUICK_ROUNDS = 2
_AT_TEST_SIZE = ("detr_r50",)
_AT_640 = ("rt_detr_r18", "rt_detr_r50")
_PRETRAINING = ("285m", "3.7g")


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Measures everything on the GPU; returns no rows if there is no GPU."""
    set_threads(threads)
    if not torch.cuda.is_available():
        print("  PyTorch sees no CUDA GPU here: nothing is measured")
        return []
    torch.backends.cudnn.benchmark = True
    print(f"  {torch.cuda.get_device_name()}, bfloat16")
    return measure(torch.device("cuda"), quick=quick)


def measure(device: torch.device, *, quick: bool) -> list[Result]:
    """Measures detectors at both image sizes, then pre-training."""
    rows: list[Result] = []
    for peers, height, width in ((_AT_TEST_SIZE, HEIGHT, WIDTH), (_AT_640, 640, 640)):
        batches = BATCHES
        if quick:
            height //= 8
            width //= 8
            batches = (1, 2)
        for batch in batches:
            images = random_images(height, width, number=batch).to(device)
            rows += compare(images, peers, quick=quick)
    return rows + measure_pretraining(device, quick=quick)


def compare(images: Tensor, peers: tuple[str, ...], *, quick: bool) -> list[Result]:
    """Times ours and peers on a batch; returns a row for each pair of our and peer's forms."""
    batch = len(images)
    if peers == _AT_640:
        ours = ["285m_211"]
        side = "640_"
    else:
        ours = ["285m_211", "3.7g_522"]
        side = ""
    contenders = [(name, form) for name in ours for form in (EAGER, DEPLOYED)]
    contenders += [(peer, form) for peer in peers for form in (EAGER, COMPILED)]
    calls: dict[str, Callable[[], object]] = {}
    with torch.inference_mode():
        for name, form in contenders:
            # Our eager form has float32 weights and uses autocast, as usual in Detectron2.
            as_built = name in ours and form == EAGER
            dtype = torch.bfloat16
            if as_built:
                dtype = torch.float32
            forward = build(
                name,
                form,
                quick=quick,
                device=images.device.type,
                dtype=dtype,
            )
            if as_built:
                forward = partial(run_in_bfloat16, forward)
            forward(images)  # compiles
            calls[f"{name}_{form}"] = partial(forward, images)
        seconds = seconds_in_rounds(
            calls,
            rounds=_QUICK_ROUNDS if quick else _ROUNDS,
            warm_up=3,
            clock=partial(synchronised_clock, images.device),
        )
    rates = {name: [batch / s for s in taken] for name, taken in seconds.items()}
    return [
        PairedResult.higher_is_better(
            f"gpu/{name}_{side}{form}_b{batch}_vs_{peer}_{other}",
            rates[f"{name}_{form}"],
            rates[f"{peer}_{other}"],
            "img/s",
        )
        for name in ours
        for form in (EAGER, DEPLOYED)
        for peer in peers
        for other in (EAGER, COMPILED)
    ]


def run_in_bfloat16(forward: Forward, images: Tensor) -> object:
    """Runs a detector with autocast."""
    with torch.autocast(images.device.type, torch.bfloat16):
        return forward(images)


def measure_pretraining(device: torch.device, *, quick: bool) -> list[Result]:
    """Times pre-training steps, with images on the device and in memory, and a matrix product."""
    setting = SETTINGS["256"]
    batch = setting.cuda_batch
    names = _PRETRAINING
    rounds = _ROUNDS
    if quick:
        setting = setting.at(size=64)
        batch = 2
        names = names[:1]
        rounds = _QUICK_ROUNDS
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        step = prepare(CONTENDERS[name], setting, batch=batch, device=device).step
        images = torch.randint(
            256, (batch, 3, setting.size, setting.size), dtype=torch.uint8, device=device
        )
        calls[name] = partial(step, images)
        calls[f"{name}_from_memory"] = FromMemory(images, step)
    product, flops = matrix_product(device)
    clock = partial(synchronised_clock, device)
    calls[MATMUL] = product
    seconds = seconds_in_rounds(calls, rounds=rounds, warm_up=3, clock=clock)
    rows: list[Result] = []
    rate = [flops / s / 1e12 for s in seconds[MATMUL]]
    for name in names:
        work = 3 * 2 * count(name, setting)[1] * batch / 1e12
        reached = [work / s for s in seconds[name]]
        row = PairedResult.higher_is_better(
            f"gpu/qb_heat_{name}_step_vs_matmul", reached, rate, "TFLOP/s"
        )
        print(f"  {row.name}: {row.ratio:.1%} of the matrix rate; wanted {GOAL:.0%}")
        rows.append(row)
        from_memory = [batch / s for s in seconds[f"{name}_from_memory"]]
        on_device = [batch / s for s in seconds[name]]
        row_name = f"gpu/qb_heat_{name}_from_memory_vs_on_gpu"
        rows.append(PairedResult.higher_is_better(row_name, from_memory, on_device, "img/s"))
    return rows


class FromMemory:
    """Runs steps on batches in pinned memory; copies the next batch during the current step."""

    def __init__(self, images: Tensor, step: Callable[[Tensor], object]) -> None:
        self._device = images.device
        self._step = step
        self._source = images.cpu()
        self._stream = None
        if images.is_cuda:
            self._source = self._source.pin_memory()
            self._stream = torch.cuda.Stream()
        self._next = self._copy()

    def __call__(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        images = self._next
        if images.is_cuda:
            images.record_stream(torch.cuda.current_stream())
        self._next = self._copy()
        self._step(images)

    def _copy(self) -> Tensor:
        with torch.cuda.stream(self._stream):  # has no effect if None
            return self._source.to(self._device, non_blocking=True)

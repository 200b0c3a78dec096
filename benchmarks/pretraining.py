# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compares a pre-training step of QB-Heat with two other methods that mask most of an image.

The peers have QB-Heat's decoder, loss, images, optimizer and share of masked patches:
  MAE-style     timm's ViT-S/16; masked patches are removed before the encoder
  SparK-style   the same Mobile-Former on the whole image, masked positions zeroed before every
                3 x 3 convolution and excluded from attention, which emulates sparse convolutions
"Nothing masked" is the same encoder on the whole image, which shows the cost of the masks.

All models are timed in turns in one process, and every round gives a ratio. "Encoder" is the
forward and backward pass of the encoder. A "step" is forward, backward and AdamW. Precision is
float32 on the CPU and bfloat16 on a GPU. MAdds are for the forward pass of one image.
"""

from collections.abc import Collection, Sequence

import torch

from benchmarks.pretraining_contenders import CONTENDERS, SETTINGS
from benchmarks.pretraining_figures import Figures, measure_setting
from benchmarks.timing import PairedResult, Result, Sample, set_threads
from qbheat_det.core.errors import UserError

_MASKED = "_masked_convolution"
_WHOLE = "_whole_image"
_MAE = "mae_vit_s"
_OURS = ("285m", "3.7g")
_ON_CPU = {  # takes four minutes on two cores
    "256": [
        _MAE,
        *(f"285m{end}" for end in ("", _MASKED, _WHOLE)),
        *(f"3.7g{end}" for end in ("", _MASKED)),
    ],
    "128": [_MAE, "285m", f"285m{_MASKED}", f"285m{_WHOLE}"],
}


def run(
    *,
    quick: bool,
    threads: int = 2,
    cases: Sequence[str] = (),
    rounds: int | None = None,
    batch: int | None = None,
) -> list[Result]:
    """Measures all settings, on the GPU if there is one; prints and returns the rows.

    Raises:
        UserError: the batch does not fit the GPU.
    """
    set_threads(threads)
    device = torch.device("cpu")
    precision = "float32"
    if torch.cuda.is_available():
        device = torch.device("cuda")
        precision = "bfloat16"
    torch.backends.cudnn.benchmark = True  # as in the recipes: all crops have one size
    results: list[Result] = []
    for name, setting in SETTINGS.items():
        if device.type == "cuda":
            models = list(CONTENDERS)
            step_batch = setting.cuda_batch
            encoder_batch = setting.cuda_batch
        else:
            models = _ON_CPU[name]
            step_batch = setting.cpu_batch
            encoder_batch = setting.cpu_encoder_batch
        models = list(cases) or models
        step_batch = batch or step_batch
        encoder_batch = batch or encoder_batch
        if quick:
            setting = setting.at(size=64)
            models = _ON_CPU["128"]
            step_batch = 2
            encoder_batch = 2
            rounds = 1
        print(
            f"{setting.size} px, {setting.title}; {step_batch} images a step, {encoder_batch} in "
            f"the encoder's part; {precision}",
            flush=True,
        )
        try:
            figures = measure_setting(
                setting,
                models,
                batch=step_batch,
                encoder_batch=encoder_batch,
                rounds=rounds,
                threads=threads,
                device=device,
            )
        except torch.cuda.OutOfMemoryError as error:
            raise UserError(
                f"{step_batch} images of {setting.size} pixels do not fit this GPU: give fewer, "
                f"as in --batch {max(1, step_batch // 4)}"
            ) from error
        print(format_figures(figures), flush=True)
        results += rows_of(name, figures)
    return results


def rows_of(setting: str, figures: Figures) -> list[Result]:
    """Returns rows that compare ours with each measured peer: rates and memory."""
    rows: list[Result] = []
    parts = {
        "encoder": (figures.encoder_batch, figures.encoder),
        "step": (figures.batch, figures.step),
    }
    for part, (batch, seconds) in parts.items():
        rates = {name: [batch / s for s in taken] for name, taken in seconds.items()}
        rows += [
            PairedResult.higher_is_better(
                f"pretraining/{setting}/{ours}_{part}_vs_{what}", rates[ours], rates[peer], "img/s"
            )
            for ours, peer, what in pairs(rates)
        ]
    rows += [
        Result.lower_is_better(
            f"pretraining/{setting}/{ours}_memory_vs_{what}",
            figures.memory[ours],
            figures.memory[peer],
            "MiB",
        )
        for ours, peer, what in pairs(figures.memory)
    ]
    return rows


def pairs(measured: Collection[str]) -> list[tuple[str, str, str]]:
    """Returns (ours, peer, kind of the peer) for all pairs of measured models."""
    every_pair = []
    for ours in _OURS:
        every_pair.append((ours, f"{ours}{_MASKED}", "masked_convolution"))
        every_pair.append((ours, f"{ours}{_WHOLE}", "whole_image"))
        every_pair.append((ours, _MAE, _MAE))
    return [pair for pair in every_pair if pair[0] in measured and pair[1] in measured]


def format_figures(figures: Figures) -> str:
    """Returns a line per model: rates as median (minimum to maximum), MAdds and memory."""
    lines = []
    for name, seconds in figures.encoder.items():
        parts = [f"encoder {Sample.of([figures.encoder_batch / s for s in seconds])} img/s"]
        if name in figures.step:
            rates = [figures.batch / s for s in figures.step[name]]
            parts.append(f"step {Sample.of(rates)} img/s")
        if name in figures.madds:
            encoder, whole = figures.madds[name]
            parts.append(f"{encoder / 1e6:,.0f} of {whole / 1e6:,.0f} MMAdds in the encoder")
        if name in figures.memory:
            parts.append(f"peak {figures.memory[name]:,.0f} MiB")
        lines.append(f"  {CONTENDERS[name].title}: {', '.join(parts)}")
    return "\n".join(lines)

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

_MASKED, _WHOLE, _MAE = "_masked_convolution", "_whole_image", "mae_vit_s"
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
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.backends.cudnn.benchmark = True  # as in the recipes: all crops have one size
    results: list[Result] = []
    for name, setting in SETTINGS.items():
        models = cases or (list(CONTENDERS) if cuda else _ON_CPU[name])
        images = batch or (setting.cuda_batch if cuda else setting.cpu_batch)
        encoded = batch or (setting.cuda_batch if cuda else setting.cpu_encoder_batch)
        if quick:
            setting = setting.at(size=64)
            models, images, encoded, rounds = _ON_CPU["128"], 2, 2, 1
        print(
            f"{setting.size} px, {setting.title}; {images} images a step, {encoded} in the "
            f"encoder's part; {'bfloat16' if cuda else 'float32'}",
            flush=True,
        )
        try:
            figures = measure_setting(
                setting,
                models,
                batch=images,
                encoder_batch=encoded,
                rounds=rounds,
                threads=threads,
                device=device,
            )
        except torch.cuda.OutOfMemoryError as error:
            raise UserError(
                f"{images} images of {setting.size} pixels do not fit this GPU: give fewer, as in "
                f"--batch {max(1, images // 4)}"
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
    found = [
        (size, *peer)
        for size in _OURS
        for peer in ((size + _MASKED, _MASKED[1:]), (size + _WHOLE, _WHOLE[1:]), (_MAE, _MAE))
    ]
    return [pair for pair in found if pair[0] in measured and pair[1] in measured]


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

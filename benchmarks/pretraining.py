# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A pre-training step of QB-Heat beside two other ways to hide three quarters of an image.

The peers have QB-Heat's decoder, loss, images, optimizer and share of hidden patches:
  MAE-style     timm's ViT-S/16; hidden patches leave before the encoder
  SparK-style   the same Mobile-Former on the whole image, hidden positions zeroed before every
                3 x 3 convolution and left out of the attention: sparse convolutions, emulated
"Nothing masked" is the same encoder on the whole image, so that what masks cost is seen.
"Compiled" are the blocks of encoder and decoder, as SOLVER.COMPILE has them; they are so by default
on a GPU, and on the CPU, where that takes minutes, when they are named. Steps of earlier states of
the package are in benchmarks/training_speed.py.

All are timed in turns in one process, and a ratio is taken in every round. The encoder's part is
its forward and backward alone; a step is forward, backward and AdamW. MAdds are those of one
image's forward pass, and a step counts as three of them. What share of the machine's rate of matrix
products a step reaches is measured beside one large product in the same rounds, float32 on the CPU,
bfloat16 on a GPU.
"""

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pretraining_contenders import CHANNELS_LAST, COMPILED, CONTENDERS, SETTINGS
from benchmarks.pretraining_figures import MATMUL, Figures, measure_setting
from benchmarks.timing import (
    ROOT,
    PairedResult,
    Result,
    Sample,
    environment,
    format_results,
    set_threads,
    write_results,
)
from qbheat_det.core.errors import UserError, exit_on_user_error

BAR = 3.5  # times as fast as SparK-style masking: the encoder's part
_MASKED, _WHOLE, _MAE = "_masked_convolution", "_whole_image", "mae_vit_s"
_OURS = ("285m", "3.7g")
_ON_CPU = {  # what four minutes of two cores allow
    "256": [
        _MAE,
        *(f"285m{end}" for end in ("", _MASKED, _WHOLE, CHANNELS_LAST)),
        *(f"3.7g{end}" for end in ("", _MASKED, CHANNELS_LAST)),
    ],
    "128": [_MAE, "285m", f"285m{_MASKED}", f"285m{_WHOLE}"],
}
_EXAMPLES = """\
examples:
  make bench ARGS="--only pretraining"
  python benchmarks/pretraining.py --settings 256 --models 285m 285m_masked_convolution --profile
  python benchmarks/pretraining.py --settings 128 --models 285m_channels_last 285m_compiled
  python benchmarks/pretraining.py --batch 64          a GPU with less memory
"""


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Measures all settings, on a GPU where there is one.

    Args:
        quick: a few models, two images of 64 pixels, one round, to see that everything runs.
        threads: CPU threads.
    """
    return measure(list(SETTINGS), threads=threads, quick=quick)


def measure(
    settings: Sequence[str],
    *,
    models: Sequence[str] = (),
    batch: int | None = None,
    rounds: int | None = None,
    threads: int = 2,
    device: str | None = None,
    quick: bool = False,
    with_profile: bool = False,
) -> list[Result]:
    """Measures, prints, and returns the rows; what is left out the device decides.

    Raises:
        UserError: the batch does not fit the GPU.
    """
    set_threads(threads)
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cuda = on.type == "cuda"
    torch.backends.cudnn.benchmark = True  # as in the recipes: all crops have one size
    where = f"{torch.cuda.get_device_name(on)}, bfloat16" if cuda else "CPU, float32"
    results: list[Result] = []
    for name in settings:
        setting = SETTINGS[name].at(size=64) if quick else SETTINGS[name]
        chosen = models or (list(CONTENDERS) if cuda else _ON_CPU[name])
        images = batch or (setting.cuda_batch if cuda else setting.cpu_batch)
        encoded = batch or (setting.cuda_batch if cuda else setting.cpu_encoder_batch)
        if quick:
            chosen, images, encoded, rounds = _ON_CPU["128"], 2, 2, 1
        print(
            f"{setting.size} px, {setting.title}; {images} images a step, {encoded} in the "
            f"encoder's part; {where}",
            flush=True,
        )
        try:
            figures = measure_setting(
                setting,
                chosen,
                batch=images,
                encoder_batch=encoded,
                rounds=rounds,
                threads=threads,
                device=on,
                with_profile=with_profile,
            )
        except torch.cuda.OutOfMemoryError as error:
            raise UserError(
                f"{images} images of {setting.size} pixels do not fit this GPU: give fewer, as in "
                f"'python benchmarks/pretraining.py --batch {max(1, images // 4)}'"
            ) from error
        rows = rows_of(name, figures)
        print(f"{format_figures(figures)}\n{format_ratios(rows)}\n", flush=True)
        results += rows
    return results


def rows_of(setting: str, figures: Figures) -> list[Result]:
    """Returns ours beside each peer that was measured: rates, memory, share of matrix products."""
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
    product = [figures.matmul_flops / s / 1e12 for s in figures.step[MATMUL]]
    for name, (_, madds) in figures.madds.items():
        flops = 3 * 2 * madds * figures.batch / 1e12
        reached = [flops / s for s in figures.step[name]]
        rows.append(
            PairedResult.higher_is_better(
                f"pretraining/{setting}/{name}_step_vs_matmul", reached, product, "TFLOP/s"
            )
        )
    return rows


def pairs(measured: Collection[str]) -> list[tuple[str, str, str]]:
    """Returns (ours, peer, what the peer is) for all that were measured."""
    found = []
    for size in _OURS:
        for form in ("", CHANNELS_LAST, COMPILED):
            layout = CHANNELS_LAST if form else ""
            peers = {f"{size}{end}{layout}": end.strip("_") for end in (_MASKED, _WHOLE)}
            peers[_MAE] = _MAE
            if form:
                peers[size] = "contiguous"
            if form == COMPILED:
                peers[f"{size}{layout}"] = "eager"
            found += [(f"{size}{form}", peer, what) for peer, what in peers.items()]
    return [pair for pair in found if pair[0] in measured and pair[1] in measured]


def format_figures(figures: Figures) -> str:
    """Returns a table with a line for each model; medians (least to greatest)."""
    width = max(len(CONTENDERS[name].title) for name in figures.encoder)
    lines = [
        f"  {'':<{width}}  {'MAdds, M':>15}  {'images per second':^53}",
        f"  {'':<{width}}  {'encoder':>7} {'whole':>7}  {'encoder':<26} {'step':<26} peak MiB",
    ]
    for name, seconds in figures.encoder.items():
        encoder, whole = (
            f"{madds / 1e6:,.0f}" for madds in figures.madds.get(name, (float("nan"),) * 2)
        )
        rates = [
            str(Sample.of([batch / s for s in taken])) if taken else ""
            for batch, taken in (
                (figures.encoder_batch, seconds),
                (figures.batch, figures.step.get(name, [])),
            )
        ]
        memory = f"{figures.memory[name]:8,.0f}" if name in figures.memory else ""
        lines.append(
            f"  {CONTENDERS[name].title:<{width}}  {encoder:>7} {whole:>7}  "
            f"{rates[0]:<26} {rates[1]:<26} {memory}"
        )
    return "\n".join(lines).replace(" nan", "    ")


def format_ratios(rows: Sequence[Result]) -> str:
    """Returns a line for each ratio of rates, and what is asked of the encoder's."""
    lines = []
    for row in rows:
        if not isinstance(row, PairedResult):
            continue
        name = row.name.split("/")[-1]
        if row.unit == "TFLOP/s":
            lines.append(f"  {name}: {row.ratio:.1%} of {row.peer:.3g} TFLOP/s")
            continue
        verdict = ""
        if name.endswith("encoder_vs_masked_convolution"):
            verdict = f"; wanted {BAR}: {'reached' if row.ratio >= BAR else 'not reached'}"
        spread = f"{row.ratio:.2f} times ({row.ratio_least:.2f} to {row.ratio_greatest:.2f})"
        lines.append(f"  {name}: {spread}{verdict}")
    return "\n".join(lines)


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Parses the flags and measures what they name."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="pixels a side"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=[],
        choices=CONTENDERS,
        metavar="NAME",
        help=f"of {', '.join(CONTENDERS)}; by default all on a GPU, a choice on the CPU",
    )
    parser.add_argument(
        "--batch", type=int, help="images a step everywhere (default: by setting and device)"
    )
    parser.add_argument("--rounds", type=int, help="(default: 4 of the encoders, 3 of the steps)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(default: cuda where it is)")
    parser.add_argument(
        "--profile", action="store_true", help="also print what operators take the time"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "bench")
    args = parser.parse_args(argv)
    set_threads(args.threads)
    print(environment())
    rows = measure(
        args.settings,
        models=args.models,
        batch=args.batch,
        rounds=args.rounds,
        threads=args.threads,
        device=args.device,
        with_profile=args.profile,
    )
    path = args.output / "pretraining.json"
    write_results(rows, path)
    print(f"{format_results(rows)}\nwritten to {path}")


if __name__ == "__main__":
    main()

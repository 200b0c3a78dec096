# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What MF-DETR's training-only help costs: a step of MF-Dec-211 with each kind beside one without.

The decoder trains on stored maps of a frozen MF-285M, batch 4, images of 512 x 512 with 8 boxes
each. A step is forward, matching, losses, backward and AdamW. Multiply-adds are those of one
forward pass of the decoder for one image, with as many further queries as the step has.

python benchmarks/training_help.py [--threads N] [--rounds N] [--cpu-seconds]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.modeling import build_model
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import qbheat_det  # noqa: F401  (registers the model)
from benchmarks.timing import (
    ROOT,
    Result,
    environment,
    format_results,
    seconds_in_rounds,
    set_threads,
    write_results,
)
from qbheat_det.analysis.complexity import CountingRule, count_madds
from qbheat_det.config import get_cfg
from qbheat_det.modeling.detr import MFDecoder, Targets
from qbheat_det.modeling.detr.mf_detr import MFDETR
from qbheat_det.modeling.detr.query_set import QuerySet

BATCH, NUM_BOXES, NUM_CLASSES = 4, 8, 7
DENOISING = ("MODEL.MF_DETR.DENOISING.GROUPS", 5)
GROUPS = ("MODEL.MF_DETR.QUERY_GROUPS.COUNT", 3)
PLAIN = "the paper's losses"
_ROUNDS = 7
KINDS: dict[str, tuple[Any, ...]] = {
    PLAIN: (),
    "varifocal": ("MODEL.MF_DETR.CLASSIFICATION", "varifocal"),
    "5 denoising groups": DENOISING,
    "5 denoising groups without negatives": (
        *DENOISING,
        "MODEL.MF_DETR.DENOISING.NEGATIVES",
        False,
    ),
    "3 groups of queries": GROUPS,
    "denoising and groups": (*DENOISING, *GROUPS),
}


def run(*, quick: bool, threads: int) -> list[Result]:
    """Times steps in turns; ``ours`` is with help, ``peer`` without."""
    del threads  # set for the process
    if quick:  # nothing, and all there is
        return measure([*KINDS][:1] + [*KINDS][-1:], size=64, rounds=1)
    return measure(KINDS, size=512, rounds=_ROUNDS)


def measure(
    kinds: Iterable[str],
    *,
    size: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Result]:
    """Returns a row of multiply-adds for each kind, then one of seconds.

    Args:
        kinds: keys of ``KINDS``, first that without help.
        size: of the images, in pixels.
        rounds: timed steps of each kind.
        clock: seconds.
    """
    features = [torch.rand(BATCH, c, size // s, size // s) for c, s in ((48, 8), (720, 16))]
    models = {name: build_head(KINDS[name]) for name in kinds}
    steps = {name: make_step(model, features) for name, model in models.items()}
    seconds = seconds_in_rounds(steps, rounds=rounds, warm_up=1, clock=clock)
    rows = []
    for name, model in models.items():
        madds = count_decoder(model.decoder, [f[:1] for f in features], num_extra(model)) / 1e9
        plain = rows[0].peer if rows else madds
        rows.append(Result.lower_is_better(f"decoder forward, {name}", madds, plain, "GMAdds"))
    for name in models:
        ours, peer = (statistics.median(seconds[each]) for each in (name, PLAIN))
        rows.append(Result.lower_is_better(f"training step, {name}", ours, peer, "s"))
    return rows


def build_head(opts: tuple[Any, ...]) -> MFDETR:
    """Returns MF-285M + MF-Dec-211 in training."""
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE, cfg.MODEL.DEVICE = "MFDETR", "cpu"
    cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE.FREEZE_AT = "MobileFormer", 5
    cfg.MODEL.MF_DETR.NUM_BLOCKS, cfg.MODEL.MF_DETR.NUM_CLASSES = [2, 1, 1], NUM_CLASSES
    cfg.merge_from_list(list(opts))
    model = build_model(cfg)
    assert isinstance(model, MFDETR)
    return model


def make_step(model: MFDETR, features: list[Tensor]) -> Callable[[], None]:
    """Returns a step on stored maps (N, C, H, W)."""
    targets = make_targets(len(features[0]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        losses = model.losses(features, None, targets)
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()

    return step


def make_targets(num_images: int) -> Targets:
    """Returns boxes of a third of an image's sides."""
    torch.manual_seed(0)
    places = [torch.rand(NUM_BOXES, 2) * 0.6 + 0.2 for _ in range(num_images)]
    boxes = [torch.cat([place, torch.full((NUM_BOXES, 2), 0.3)], dim=1) for place in places]
    return Targets.stack([torch.arange(NUM_BOXES) % NUM_CLASSES] * num_images, boxes)


def num_extra(model: MFDETR) -> int:
    """Returns the further queries of an image."""
    help_ = model.auxiliary_queries
    return 0 if help_ is None else help_(make_targets(1)).content.shape[1]


def count_decoder(decoder: MFDecoder, features: list[Tensor], num_queries: int) -> int:
    """Returns the multiply-adds of a forward pass with so many further queries."""
    return count_madds(_WithQueries(decoder, num_queries), *features).total(CountingRule.CORE)


class _WithQueries(nn.Module):
    def __init__(self, decoder: MFDecoder, num_queries: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.num_queries = num_queries

    def forward(self, fine: Tensor, coarse: Tensor) -> Tensor:
        if not self.num_queries:
            return self.decoder.refine_queries([fine, coarse])
        zeros = fine.new_zeros(
            len(fine), self.num_queries, self.decoder.query_position.embedding_dim
        )
        hidden = torch.zeros(1, self.num_queries, self.num_queries, dtype=torch.bool)
        extra = QuerySet(zeros, zeros, hidden, hidden[0, 0])
        return self.decoder.refine_queries([fine, coarse], extra=extra)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures with the flags' settings, prints a table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"(default: {_ROUNDS})")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument(
        "--cpu-seconds",
        action="store_true",
        help="time on the CPU instead of time on the clock, for a machine that is shared",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "bench")
    args = parser.parse_args(argv)
    set_threads(args.threads)
    print(environment())
    clock = time.process_time if args.cpu_seconds else time.perf_counter
    rows = measure(KINDS, size=512, rounds=args.rounds, clock=clock)
    write_results(rows, args.output / "training_help.json")
    print(format_results(rows))


if __name__ == "__main__":
    main()

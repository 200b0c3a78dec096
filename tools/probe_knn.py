#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Score backbones by nearest neighbours: what they separate without any training on labels.

The training images of a folder of class folders vote on those of another, by the cosine similarity
of the mean over a map of the backbone. Rows are files of weights and random initialisations of the
same config, each as it is and, with --recalibrate-bn, with BatchNorm's statistics estimated anew on
whole training images: pre-training by quarters gathers them on quarters.

examples:
  # the checkpoints of a run beside two random backbones; the config is the one in the weights
  python tools/probe_knn.py --weights output/pretraining/model_*.pth --random-seeds 1 2 \\
      --train-folder flowers/train --val-folder flowers/val --recalibrate-bn 1024

  # any backbone of any config on larger images, with the figures in a file
  python tools/probe_knn.py --config-file configs/custom/qb_heat_285M_cpu.yaml --random \\
      --train-folder flowers/train --val-folder flowers/val --json knn.json INPUT.PRETRAIN.SIZE 224
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from detectron2.config import CfgNode
from tabulate import tabulate

import qbheat_det  # noqa: F401  (registers models and data sets)
from qbheat_det.checkpoint import check_weights_file, write_atomically
from qbheat_det.config import load_config
from qbheat_det.engine.knn_probe import KnnProbe, ProbeRow
from qbheat_det.engine.run_config import load_run_config
from qbheat_det.errors import UserError, exit_with_sentence


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    summary, rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--train-folder", required=True, metavar="DIR", help="class folders whose images vote")
    add("--val-folder", required=True, metavar="DIR", help="class folders that are classified")
    add("--config-file", metavar="FILE", help="YAML; by default the config of the first weights")
    add(
        "--weights",
        metavar="FILE",
        action="extend",
        nargs="+",
        default=[],
        help="checkpoints, exported backbones, detectors (.safetensors, .pth); repeatable",
    )
    add("--random", action="store_true", help="a random initialisation, under SEED (or 0)")
    add("--random-seeds", metavar="SEED", type=int, nargs="+", default=[], help="several of them")
    add(
        "--recalibrate-bn",
        metavar="N",
        type=int,
        default=0,
        help="a second row for each, with BatchNorm's statistics from N whole training images",
    )
    add("--feature", metavar="NAME", default="", help="a map of the backbone, such as s16")
    add("--json", metavar="FILE", type=Path, help="write the figures to this file too")
    add("opts", nargs="*", default=[], metavar="KEY VALUE", help="overrides of the config")
    return parser.parse_intermixed_args(argv)


def load(args: argparse.Namespace) -> CfgNode:
    """Returns the config that the arguments ask for, or that the first weights hold."""
    if args.config_file:
        cfg = load_config(args.config_file, args.opts)
    elif args.weights:
        cfg = load_run_config(args.weights[0], opts=args.opts)
    else:
        raise UserError("a random backbone needs a config: name it with --config-file")
    if cfg.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available():
        cfg.MODEL.DEVICE = "cpu"
    if cfg.TEST.KNN.K < 1 or not cfg.TEST.KNN.TEMPERATURE > 0:
        raise UserError("TEST.KNN.K and TEST.KNN.TEMPERATURE must be positive")
    return cfg


def render(rows: Sequence[ProbeRow]) -> str:
    """Returns the table, in Markdown."""

    def share(value: float, error: float) -> str:
        return f"{value:.2f} ± {error:.2f}"

    lines = [
        (
            row.backbone,
            f"{row.recalibrated:,} whole images" if row.recalibrated else "as stored",
            share(row.score.top1, row.score.top1_standard_error),
            share(row.score.top5, row.score.top5_standard_error),
        )
        for row in rows
    ]
    headers = ("backbone", "statistics of BatchNorm", "top-1, %", "top-5, %")
    return str(tabulate(lines, headers, tablefmt="pipe"))


@exit_with_sentence
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if args.recalibrate_bn < 0:
        raise UserError(f"--recalibrate-bn is a number of images, not {args.recalibrate_bn}")
    for file in args.weights:  # all, before minutes go into the first
        check_weights_file(file)
    cfg = load(args)
    seeds = [*([max(cfg.SEED, 0)] if args.random else []), *args.random_seeds]
    if not (args.weights or seeds):
        raise UserError("name what to score: --weights FILE, --random or --random-seeds 1 2 3")
    probe = KnnProbe(
        cfg,
        args.train_folder,
        args.val_folder,
        num_recalibrated=args.recalibrate_bn,
        feature=args.feature,
        seed=max(cfg.SEED, 0),
        progress=True,
    )
    for weights in args.weights:
        probe.score_weights(weights)
    for seed in seeds:
        probe.score_random(seed)
    keys = cfg.TEST.KNN
    setting = {
        "feature": probe.feature,
        "size": cfg.INPUT.PRETRAIN.SIZE,
        "k": keys.K,
        "temperature": keys.TEMPERATURE,
        "broken_images": probe.num_broken,
    }
    print(render(probe.rows))
    print(
        f"\nMean over the map '{probe.feature}' of whole images of {cfg.INPUT.PRETRAIN.SIZE} "
        f"pixels; k {keys.K}, temperature {keys.TEMPERATURE}; ± one standard error over the "
        f"{probe.rows[0].score.num_images:,} images classified. {probe.num_broken} left out."
    )
    if args.json:
        content = {**setting, "rows": [row.to_dict() for row in probe.rows]}
        text = json.dumps(content, indent=1).encode()
        write_atomically(args.json, lambda stream: stream.write(text))


if __name__ == "__main__":
    main()

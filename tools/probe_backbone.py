#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probe frozen backbones on class folders: kNN, a linear classifier, tran-1, tran-4.

Each backbone encodes all images once. Probes are trained on the training images and classify the
validation images. L2 penalty, dropout and number of epochs are selected for each backbone on a
held-out part of the training images. A backbone is a weights file, or a random initialization of
the same config. QB-Heat estimates BatchNorm statistics on quarters of images. --recalibrate-bn adds
a second row, for which they are estimated on whole training images. For weights of QB-Heat and of
random masking, the loss on the validation images is printed beside predictors without a network.

examples:
  # checkpoints of a run beside two random backbones; the config comes from the weights
  qbheat probe --weights output/pretraining/model_*.pth --random-seeds 1 2 \\
      --data flowers/train --val flowers/val --recalibrate-bn 1024 \\
      --json probes.json

  # the backbone of any config on larger images, two probes only
  qbheat probe --config-file custom/qb_heat_285M_cpu.yaml --random \\
      --data flowers/train --val flowers/val --probes knn linear \\
      INPUT.PRETRAIN.SIZE 224

  # a wider decoder, as in Fig. 8 of the paper
  qbheat probe --weights output/pretraining/model_final.pth \\
      --data flowers/train --val flowers/val --probes tran-1 MODEL.CLASSIFIER.WIDTH 384

With --json, a repeated command continues with the missing rows.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import check_inputs, make_parser

if TYPE_CHECKING:  # imported below after the arguments are parsed
    from detectron2.config import CfgNode

_HEADERS = ("backbone", "images seen", "BatchNorm", "probe", "top-1, %", "top-5, %", "chosen")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--data", required=True, metavar="DIR", help="class folders that train the probes")
    add("--val", required=True, metavar="DIR", help="class folders that the probes classify")
    add("--config-file", metavar="FILE", help="YAML; by default the config of the first weights")
    add(
        "--weights",
        metavar="FILE",
        action="extend",
        nargs="+",
        default=[],
        help="checkpoints, exported backbones, detectors (.safetensors, .pth, qbheat://NAME)",
    )
    add("--random", action="store_true", help="probe a random initialization with SEED (or 0)")
    add(
        "--random-seeds",
        metavar="SEED",
        type=int,
        nargs="+",
        default=[],
        help="probe random initializations with these seeds",
    )
    add(
        "--probes",
        metavar="PROBE",
        nargs="+",
        default=["knn", "linear", "tran-1"],
        help="knn, linear, tran-1, tran-4 (default: the first three)",
    )
    add(
        "--recalibrate-bn",
        metavar="N",
        type=int,
        default=0,
        help="add a row for each probe, with BatchNorm statistics of N training images",
    )
    add("--feature", metavar="NAME", default="", help="feature map of the backbone, such as s16")
    add(
        "--memory-gb",
        metavar="GB",
        type=float,
        default=8.0,
        help="memory for feature maps, which tran-1 and tran-4 keep (default: 8)",
    )
    add("--json", metavar="FILE", type=Path, help="file that is rewritten after each row")
    parser.add_overrides("overrides of the config, such as TEST.KNN.K 20")
    return parser.parse_args(argv)


def load(args: argparse.Namespace) -> "CfgNode":
    """Returns the config in ``--config-file``, or else the config of the first weights file.

    Raises a ``UserError`` if there is neither, or if a key is invalid.
    """
    import torch

    from qbheat_det.checkpoint import load_run_config
    from qbheat_det.config import load_config
    from qbheat_det.core.errors import UserError

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


def check(args: argparse.Namespace) -> None:
    """Checks the arguments before the first probe starts. Replaces names of weights by addresses.

    Raises a ``UserError`` if an argument is invalid.
    """
    from qbheat_det.checkpoint import check_weights_file, find_weights
    from qbheat_det.core.errors import UserError

    if args.recalibrate_bn < 0:
        raise UserError(f"--recalibrate-bn is a number of images, not {args.recalibrate_bn}")
    args.weights = [find_weights(name) for name in args.weights]
    for file in args.weights:
        check_weights_file(file)
    if not (args.weights or args.random or args.random_seeds):
        raise UserError("name what to probe: --weights FILE, --random or --random-seeds 1 2 3")


def describe(row: dict[str, Any]) -> tuple[str, ...]:
    """Converts a row of the results to the cells of the table, in the order of the headers."""
    images_seen = ""
    if row["images_seen"] is not None:
        images_seen = f"{row['images_seen']:,}"
    batch_norm = "as stored"
    if row["recalibrated"]:
        batch_norm = f"{row['recalibrated']:,} whole images"
    chosen = []
    for key, value in row["chosen"].items():
        if key in ("l2", "dropout", "epochs"):
            text = f"{value:.2g}" if isinstance(value, float) else value
            chosen.append(f"{key} {text}")
    top1 = f"{row['top1']:.2f} ± {row['top1_standard_error']:.2f}"
    top5 = f"{row['top5']:.2f} ± {row['top5_standard_error']:.2f}"
    return row["backbone"], images_seen, batch_norm, row["probe"], top1, top5, ", ".join(chosen)


def print_line(cells: Sequence[str]) -> None:
    """Prints one line of a Markdown table, so that it is visible at once."""
    print(f"| {' | '.join(cells)} |", flush=True)


def print_closing(result: dict[str, Any]) -> None:
    """Prints the losses of models that reconstruct images, and the settings, below the table."""
    if result["losses"]:
        print("\nLoss of masked pixels of --val images, beside predictors without a network:\n")
    for file, losses in result["losses"].items():
        # There is no "ridge" for a few images.
        names = [name for name in ("zero", "mean", "ridge") if name in losses]
        baselines = ", ".join(f"{name} {losses[name]:.4f}" for name in names)
        loss = f"{losses['loss']:.4f} ± {losses['loss_standard_error']:.4f} ({baselines})"
        print(f"{file}: loss {loss}, {losses['num_images']:,} images")
    setting = result["setting"]
    knn = setting["knn"]
    print(
        f"\nMap '{setting['feature']}' of whole images at {setting['size']} pixels. kNN uses its "
        f"mean over positions, k {knn['k']}, temperature {knn['temperature']}. ± is one standard "
        f"error over images. Left out: {result['skipped_images']} images."
    )


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check_inputs(args.data, args.val, weights=args.weights, config_file=args.config_file)
    from qbheat_det.core.errors import exit_on_user_error

    exit_on_user_error(run)(args)


def run(args: argparse.Namespace) -> None:
    """Probes each backbone and prints a row for each probe."""
    import logging

    from qbheat_det.probing import BackboneProbe

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    check(args)
    cfg = load(args)
    probe = BackboneProbe(
        cfg,
        args.data,
        args.val,
        probes=args.probes,
        num_recalibrated=args.recalibrate_bn,
        feature=args.feature,
        json_file=args.json,
        memory_gb=args.memory_gb,
        on_row=lambda row: print_line(describe(row)),
    )
    print_line(_HEADERS)
    print_line(["---"] * len(_HEADERS))
    for file in args.weights:
        probe.probe_weights(file)
    if args.random:
        probe.probe_random(max(cfg.SEED, 0))
    for seed in args.random_seeds:
        probe.probe_random(seed)
    print_closing(probe.results)


if __name__ == "__main__":
    main()

#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probe frozen backbones on a folder of class folders: kNN, a linear classifier, tran-1, tran-4.

Each backbone goes over all images once; the probes learn from what it gave for the training images
and classify the others. Settings that decide (L2 penalty, dropout, length) are chosen for each
backbone on a part of the training images, never on those that are classified. Rows are files of
weights and random initialisations of the same config, each as it is and, with --recalibrate-bn,
with BatchNorm's statistics estimated anew on whole training images: pre-training by quarters
gathers them on quarters.

examples:
  # the checkpoints of a run beside two random backbones; the config is the one in the weights
  qbheat probe --weights output/pretraining/model_*.pth --random-seeds 1 2 \\
      --data flowers/train --val flowers/val --recalibrate-bn 1024 \\
      --json probes.json --plot probes.svg

  # any backbone of any config on larger images, by two probes only
  qbheat probe --config-file custom/qb_heat_285M_cpu.yaml --random \\
      --data flowers/train --val flowers/val --probes knn linear \\
      INPUT.PRETRAIN.SIZE 224

  # wider decoders; qbheat visualize probes draws the results as Fig. 8 of the paper
  qbheat probe --weights output/pretraining/model_final.pth \\
      --data flowers/train --val flowers/val --probes tran-1:192 tran-1:384 \\
      --json output/pretraining/probes.json

With --json, a command that was stopped and is repeated goes on with the rows that are missing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arguments import check_inputs, make_parser

if TYPE_CHECKING:  # imported by main, after the arguments were parsed
    from detectron2.config import CfgNode

_HEADERS = ("backbone", "images seen", "BatchNorm", "probe", "top-1, %", "top-5, %", "chosen")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--data", required=True, metavar="DIR", help="class folders to learn from")
    add("--val", required=True, metavar="DIR", help="class folders that are classified")
    add("--config-file", metavar="FILE", help="YAML; by default the config of the first weights")
    add(
        "--weights",
        metavar="FILE",
        action="extend",
        nargs="+",
        default=[],
        help="checkpoints, exported backbones, detectors (.safetensors, .pth, qbheat://NAME)",
    )
    add("--random", action="store_true", help="a random initialisation, under SEED (or 0)")
    add("--random-seeds", metavar="SEED", type=int, nargs="+", default=[], help="several of them")
    add(
        "--probes",
        metavar="PROBE",
        nargs="+",
        default=["knn", "linear", "tran-1"],
        help="of knn, linear, tran-1 and tran-4; the first three by default. tran-1:384 has this "
        "width, a multiple of 64, in place of MODEL.CLASSIFIER.WIDTH",
    )
    add(
        "--recalibrate-bn",
        metavar="N",
        type=int,
        default=0,
        help="a second row for each, with BatchNorm's statistics from N whole training images",
    )
    add("--feature", metavar="NAME", default="", help="a map of the backbone, such as s16")
    add(
        "--memory-gb",
        metavar="GB",
        type=float,
        default=8.0,
        help="what maps may take, which only tran-1 and tran-4 keep (default 8)",
    )
    add(
        "--json",
        metavar="FILE",
        type=Path,
        help="keep the figures in this file, current at any time",
    )
    add("--plot", metavar="FILE", type=Path, help="draw top-1 against images seen (.svg, .png)")
    add("opts", nargs="*", default=[], metavar="KEY VALUE", help="overrides of the config")
    return parser.parse_intermixed_args(argv)


def load(args: argparse.Namespace) -> "CfgNode":
    """Returns the config that the arguments ask for, or that the first weights hold."""
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
    """Checks what can be checked before minutes go into the first row.

    Raises:
        UserError: an argument is not sound.
    """
    from qbheat_det.checkpoint import check_weights_file, find_weights
    from qbheat_det.core.errors import UserError

    if args.recalibrate_bn < 0:
        raise UserError(f"--recalibrate-bn is a number of images, not {args.recalibrate_bn}")
    if args.plot is not None and args.plot.suffix not in (".svg", ".png"):
        raise UserError(f"--plot names an image, .svg or .png, not '{args.plot}'")
    args.weights = [find_weights(name) for name in args.weights]
    for file in args.weights:
        check_weights_file(file)
    if not (args.weights or args.random or args.random_seeds):
        raise UserError("name what to probe: --weights FILE, --random or --random-seeds 1 2 3")


def describe(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a row, in the order of the headers."""
    tried = {
        key: f"{value:.2g}" if isinstance(value, float) else value
        for key, value in row["chosen"].items()
        if key in ("l2", "dropout", "epochs")
    }
    return (
        row["backbone"],
        "" if row["images_seen"] is None else f"{row['images_seen']:,}",
        f"{row['recalibrated']:,} whole images" if row["recalibrated"] else "as stored",
        row["probe"],
        *(f"{row[key]:.2f} ± {row[f'{key}_standard_error']:.2f}" for key in ("top1", "top5")),
        ", ".join(f"{key} {value}" for key, value in tried.items()),
    )


def print_line(cells: Sequence[str]) -> None:
    """Prints one line of a table in Markdown, at once."""
    print(f"| {' | '.join(cells)} |", flush=True)


def print_closing(result: dict[str, Any]) -> None:
    """Says under the table what its figures are."""
    setting = result["setting"]
    knn = setting["knn"]
    print(
        f"\nThe map '{setting['feature']}' of whole images of {setting['size']} pixels; kNN by "
        f"its mean over positions, k {knn['k']}, temperature {knn['temperature']}; ± one standard "
        f"error over the images classified. {result['skipped_images']} images left out."
    )


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check_inputs(args.data, args.val)
    from qbheat_det.core.errors import exit_on_user_error

    exit_on_user_error(run)(args)


def run(args: argparse.Namespace) -> None:
    """Probes one backbone after another, and prints a row for each probe."""
    import logging

    from qbheat_det.analysis.accuracy import plot_probes
    from qbheat_det.analysis.plotting import chart_image
    from qbheat_det.core.files import write_atomically
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
    for number in [*([max(cfg.SEED, 0)] if args.random else []), *args.random_seeds]:
        probe.probe_random(number)
    result = probe.results
    print_closing(result)
    if args.plot is not None:
        chart = chart_image(plot_probes(result), format=args.plot.suffix[1:])
        write_atomically(args.plot, chart.content)


if __name__ == "__main__":
    main()

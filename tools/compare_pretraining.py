#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compare pre-training objectives with the same encoder, number of images seen and probes.

Pre-trains each objective with each seed, and probes the frozen encoder (nearest neighbors, linear,
tran-k). Each step is a command that runs in a separate process and can resume. To continue an
interrupted comparison, repeat the command. OUTPUT/comparison.md and .json are rewritten after each
step.

examples:
  # print the commands, and whether each command is done
  qbheat compare --data flowers/train --val flowers/val \\
      --epochs 20 --seeds 1 2 3 --output output/comparison --plan

  # all objectives, the random encoder first
  qbheat compare --data flowers/train --val flowers/val \\
      --epochs 20 --seeds 1 2 3 --output output/comparison

  # two objectives and a config file
  qbheat compare --data flowers/train --val flowers/val \\
      --objectives qb_heat moco_v2 mine.yaml --epochs 20 --output output/comparison

  # with the features of a teacher as the target; its weights are downloaded once
  qbheat compare --data flowers/train --val flowers/val \\
      --objectives random qb_heat distill --epochs 20 --output output/comparison
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from arguments import check_inputs, make_parser

# Keys that flags or the tool itself set for every run.
_RESERVED = {
    "SEED",
    "SOLVER.EPOCHS",
    "SOLVER.MAX_ITER",
    "OUTPUT_DIR",
    "MODEL.WEIGHTS",
    "MODEL.META_ARCHITECTURE",
    "DATASETS.TRAIN",
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--data", required=True, metavar="DIR", help="class folders for pre-training and probes")
    add("--val", required=True, metavar="DIR", help="class folders that the probes classify")
    add(
        "--objectives",
        metavar="NAME|FILE",
        nargs="+",
        default=[],
        help="names in configs/objectives, or config files (default: all except distill)",
    )
    add("--epochs", type=float, required=True, help="epochs of pre-training")
    add("--seeds", type=int, nargs="+", default=[1, 2], help="seeds of pre-training (default: 1 2)")
    add(
        "--probes",
        nargs="+",
        default=["knn", "linear", "tran-1"],
        metavar="PROBE",
        help="knn, linear, tran-1, tran-4 (default: the first three)",
    )
    add(
        "--recalibrate-bn",
        type=int,
        default=1024,
        metavar="N",
        help="number of training images for BatchNorm statistics (default: 1024)",
    )
    add("--output", type=Path, required=True, metavar="DIR", help="folder of all results")
    add("--plan", action="store_true", help="print the commands without running them")
    parser.add_overrides("overrides of all configs, such as SOLVER.IMS_PER_BATCH 64")
    args = parser.parse_args(argv)
    reserved = [key for key in args.opts[::2] if key in _RESERVED]
    if reserved:
        parser.error(f"{reserved[0]} is set by a flag, or by the config of the objective")
    if not args.epochs > 0 or args.recalibrate_bn < 1:
        parser.error("--epochs must be above 0, --recalibrate-bn at least 1")
    if min(args.seeds) < 0 or len(set(args.seeds)) < len(args.seeds):
        parser.error(f"--seeds must be different numbers from 0, not {args.seeds}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    check_inputs(args.data, args.val)
    from qbheat_det.core.errors import exit_on_user_error

    return exit_on_user_error(run)(args)


def run(args: argparse.Namespace) -> int:
    """Runs or lists the commands. Returns the exit code."""
    from comparison_jobs import compare, plan_row

    from qbheat_det.analysis.comparison import Comparison, list_rows, load_objectives
    from qbheat_det.probing import check_probes

    check_probes(args.probes)
    comparison = Comparison(
        objectives=load_objectives(args.objectives, args.opts),
        seeds=args.seeds,
        epochs=args.epochs,
        train_folder=args.data,
        val_folder=args.val,
        output_dir=args.output,
        probes=list(dict.fromkeys(args.probes)),
        num_recalibrated=args.recalibrate_bn,
        opts=args.opts,
    )
    if args.plan:
        for row in list_rows(comparison):
            for job in plan_row(comparison, row):
                state = "done" if job.is_done() else shlex.join(job.command)
                print(f"{job.title}: {state}")
        return 0
    tables, failed = compare(comparison)
    print(tables)
    for title, reason in failed.items():
        print(f"failed: {title}: {reason}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compare objectives of pre-training: same encoder, same images, as many of them seen, same probes.

Each objective is pre-trained under each seed; its frozen encoder is then probed (nearest
neighbours, linear, tran-k) and, where boxes are given, put under detectors. All of that runs in
processes of their own, each with its log and its result in a file: whatever stops this command, the
same command goes on where it was. OUTPUT/comparison.md, .svg, .png and .json are current after each
stage.

examples:
  # what would be run, and what is known of the time it takes
  python tools/compare_pretraining.py --train-folder flowers/train --val-folder flowers/val \\
      --epochs 20 --seeds 1 2 3 --output-dir output/comparison --plan

  # all objectives, the random encoder first; two stages at a time
  python tools/compare_pretraining.py --train-folder flowers/train --val-folder flowers/val \\
      --epochs 20 --seeds 1 2 3 --output-dir output/comparison --jobs 2

  # two objectives and one of one's own on unlabelled pictures, probes and frozen detectors
  python tools/compare_pretraining.py --train-folder flowers/train --val-folder flowers/val \\
      --image-folder photos/ --objectives qb_heat moco_v2 mine.yaml --epochs 20 --seeds 1 2 \\
      --train-json train.json --train-images images/ --val-json val.json --val-images images/ \\
      --detectors retinanet mf-dec-211 --output-dir output/comparison SOLVER.IMS_PER_BATCH 128
"""

import argparse
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType

warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
warnings.filterwarnings("ignore", message="torch.meshgrid")

import qbheat_det  # noqa: E402, F401  registers models and data
from qbheat_det.core.errors import UserError, exit_on_user_error  # noqa: E402
from qbheat_det.engine.comparison import (  # noqa: E402
    DETECTORS,
    Comparison,
    compare,
    load_objectives,
    render_plan,
)
from qbheat_det.probing import check_probes  # noqa: E402

_BOXES = ("train_json", "train_images", "val_json", "val_images")
# What flags or the tool itself say of every run.
_TAKEN = {
    "SEED": "--seeds",
    "SOLVER.EPOCHS": "--epochs",
    "SOLVER.MAX_ITER": "--epochs",
    "OUTPUT_DIR": "--output-dir",
    "MODEL.WEIGHTS": "the objectives' configs",
    "MODEL.META_ARCHITECTURE": "--objectives",
    "DATASETS.TRAIN": "--train-folder and --image-folder",
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    summary, rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--train-folder", required=True, metavar="DIR", help="class folders to learn from")
    add("--val-folder", required=True, metavar="DIR", help="class folders to be judged on")
    add(
        "--image-folder",
        metavar="DIR",
        action="append",
        default=[],
        help="pre-train on these images instead of --train-folder's, without labels; repeatable",
    )
    for flag in _BOXES:
        what = "annotations in COCO format" if flag.endswith("json") else "folder of their images"
        add(f"--{flag.replace('_', '-')}", metavar="PATH", help=f"for --detectors: {what}")
    add(
        "--objectives",
        metavar="NAME|FILE",
        nargs="+",
        default=[],
        help="names below configs/objectives, or config files; by default all, random first",
    )
    add("--epochs", type=float, required=True, help="passes over the images of pre-training")
    add("--seeds", type=int, nargs="+", default=[1, 2], help="by default 1 2")
    add("--probes", nargs="+", default=["knn", "linear", "tran-1"], metavar="PROBE",
        help="knn, linear, tran-1, tran-4 (by default the first three)")  # fmt: skip
    add("--probes-as-stored", nargs="*", default=["knn", "linear"], metavar="PROBE",
        help="those that are reported with BatchNorm's statistics as trained as well "
        "(by default knn and linear, which take no minutes)")  # fmt: skip
    add("--recalibrate-bn", type=int, default=1024, metavar="N",
        help="whole training images for BatchNorm's statistics (1024)")  # fmt: skip
    add("--detectors", nargs="+", default=[], choices=list(DETECTORS), help="frozen detectors")
    add("--detector-opts", nargs="+", default=[], metavar="KEY VALUE",
        help="overrides of the detectors' configs")  # fmt: skip
    add("--output-dir", type=Path, required=True, metavar="DIR", help="folder of everything")
    add("--jobs", type=int, default=1, help="stages at a time; each gets its share of threads (1)")
    add("--plan", action="store_true", help="print the stages, run nothing")
    add("opts", nargs="*", default=[], metavar="KEY VALUE", help="overrides of every objective")
    return parser.parse_intermixed_args(argv)


def build_comparison(args: argparse.Namespace) -> Comparison:
    """Turns the arguments into what is to be run.

    Raises:
        UserError: they contradict each other, or a config is not sound.
    """
    if len(args.opts) % 2 or len(args.detector_opts) % 2:
        raise UserError("overrides are KEY VALUE pairs, but one has no partner")
    if taken := [key for key in args.opts[::2] if key in _TAKEN]:
        raise UserError(f"{taken[0]} is for {_TAKEN[taken[0]]} to say: leave it out")
    if not args.epochs > 0 or args.jobs < 1 or args.recalibrate_bn < 1:
        raise UserError("--epochs must be above 0, --jobs and --recalibrate-bn at least 1")
    if min(args.seeds) < 0 or len(set(args.seeds)) < len(args.seeds):
        raise UserError(f"--seeds must be different numbers from 0, but are {args.seeds}")
    check_probes(args.probes)
    given = [getattr(args, flag) for flag in _BOXES]
    if any(given) != bool(args.detectors) or (args.detectors and not all(given)):
        flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in _BOXES)
        raise UserError(f"--detectors and {flags} go together, all of them")
    return Comparison(
        objectives=load_objectives(args.objectives, args.opts),
        seeds=args.seeds,
        epochs=args.epochs,
        train_folder=args.train_folder,
        val_folder=args.val_folder,
        image_folders=args.image_folder,
        probes=list(dict.fromkeys(args.probes)),
        probes_as_stored=[name for name in args.probes_as_stored if name in args.probes],
        num_recalibrated=args.recalibrate_bn,
        detectors=list(dict.fromkeys(args.detectors)),
        annotations=given if args.detectors else (),
        opts=args.opts,
        detector_opts=args.detector_opts,
        output_dir=args.output_dir,
        tools=Path(__file__).resolve().parent,
    )


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    comparison = build_comparison(args)
    if args.plan:
        print(render_plan(comparison, jobs=args.jobs))
        return
    signal.signal(signal.SIGTERM, _interrupt)  # ended as by Ctrl-C, so that no process is left
    table, failed = compare(comparison, jobs=args.jobs)
    print(table)
    if failed:
        for title, reason in failed.items():
            print(f"failed: {title}: {reason}", file=sys.stderr)
        raise SystemExit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()

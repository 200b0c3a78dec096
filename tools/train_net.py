#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trains or evaluates the model that a config names.

Examples:
  Train on the included images of blood cells:
    qbheat train --config-file quick_schedules/retinanet_small_cells.yaml
  Train on a custom dataset (class names and count come from the file):
    qbheat train --config-file custom/retinanet_lite0_finetune.yaml \\
        --data train.json --val val.json --images images/ --output output/mine
  Evaluate with the config inside the weights:
    qbheat evaluate --weights output/mine/model_best.safetensors --data val.json
  Pre-train on custom images, and log the loss on a second set of images:
    qbheat pretrain --config-file custom/qb_heat_285M_cpu.yaml --images photos/ \\
        --val-images others/ TEST.EVAL_EPOCHS 5
  Train a classifier on class folders, with a frozen encoder:
    qbheat train --config-file custom/tran1_285M_probe.yaml \\
        --data train/ --val val/ --weights output/model_final.safetensors
  Also learn from images without labels:
    qbheat train --config-file custom/cached_retinanet_285M_probe.yaml --data train.json \\
        --unlabelled photos/ --weights distill/285M
  Add the classes of new images to a detector, without labels of its old classes in them:
    qbheat train --data new.json --weights output/mine --keep-classes --output output/grown
  Check whether a run will work, and estimate how long it will take:
    qbheat train --config-file quick_schedules/retinanet_small_cells.yaml --dry-run
  Continue a run that was stopped (the results are those of an uninterrupted run, bit by bit):
    qbheat train --config-file quick_schedules/retinanet_small_cells.yaml --resume
  Train on eight GPUs, or with two processes on the CPU:
    qbheat train --config-file coco/mf_detr_211_285M_probe.yaml --num-gpus 8
    torchrun --nproc-per-node 2 tools/train_net.py \\
        --config-file configs/quick_schedules/retinanet_small_cells.yaml
"""

import argparse
import dataclasses
import tempfile
from typing import TYPE_CHECKING, Any

from arguments import (
    Parser,
    add_data_flags,
    add_training_flags,
    check_inputs,
    hide_foreign_warnings,
)

if TYPE_CHECKING:  # imported below after the arguments are parsed
    from qbheat_det.engine import RunFlags

hide_foreign_warnings()  # processes on other GPUs import this file


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(epilog=__doc__)
    add_training_flags(parser)
    add_data_flags(parser).add_argument(
        "--unlabelled",
        metavar="DIR",
        action="append",
        default=[],
        help="folder of images without labels (and its subfolders), from which a RetinaNet or FCOS "
        "learns in addition to --data; repeatable",
    )
    parser.add_argument(
        "--keep-classes",
        action="store_true",
        help="keep the classes of the detector in --weights beside those of --data, in which the "
        "old classes need no labels",
    )
    group = parser.add_argument_group("checks and recovery")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="train a few steps, evaluate a few images and save to a temporary folder; print the "
        "expected time, memory and disk space of the whole run",
    )
    group.add_argument(
        "--allow-partial",
        action="store_true",
        help="start from --weights even if only part of the file fits the model",
    )
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains or evaluates in this process. Returns the results of the last evaluation.

    With ``--eval-only``, result files are kept only if the command names an output folder, or the
    run to ``--resume``. Otherwise, they are written to a temporary folder.
    """
    from qbheat_det.core.errors import UserError
    from qbheat_det.engine import RunFlags

    flags = RunFlags.from_args(args)
    if not flags.eval_only:
        return train(flags, is_dry=args.dry_run)
    if args.dry_run:
        raise UserError("--dry-run rehearses training: leave out --eval-only")
    if flags.output or flags.resume or "OUTPUT_DIR" in flags.opts:
        return evaluate(flags, is_temporary=False)
    with tempfile.TemporaryDirectory(prefix="qbheat_evaluate_") as folder:
        return evaluate(dataclasses.replace(flags, output=folder), is_temporary=True)


def train(flags: "RunFlags", *, is_dry: bool) -> dict[str, Any]:
    """Trains the stages of a run, and returns the results of the last evaluation.

    A dry run only prints the expected time, memory and disk space, and returns {}.
    """
    from qbheat_det.api.training import build_trainer, plan_run, train_run
    from qbheat_det.engine.dry_run import print_forecast

    stages = plan_run(flags)
    if is_dry:
        print_forecast(stages, build_trainer(flags))
        return {}
    return train_run(stages)


def evaluate(flags: "RunFlags", *, is_temporary: bool) -> dict[str, Any]:
    """Evaluates weights, and prints the results on the main process.

    ``is_temporary`` tells whether the output folder will be removed.
    """
    from qbheat_det.api.training import evaluate_stage
    from qbheat_det.engine import assemble_evaluation
    from qbheat_det.engine.logs import print_results

    stage = dataclasses.replace(assemble_evaluation(flags), is_temporary=is_temporary)
    results = evaluate_stage(stage)
    if results:
        print_results(results)
    return results


def invoke_main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    paths = [*args.data, *args.images, *args.val, *args.val_images, *args.unlabelled]
    check_inputs(*paths, args.class_map, weights=[args.weights], config_file=args.config_file)
    from qbheat_det.core.errors import exit_on_user_error
    from qbheat_det.engine import run_distributed

    exit_on_user_error(run_distributed)(main, args)


if __name__ == "__main__":
    invoke_main()

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
import functools
import logging
import tempfile
from pathlib import Path
from typing import Any

from arguments import (
    Parser,
    add_data_flags,
    add_training_flags,
    check_inputs,
    hide_foreign_warnings,
)

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
    args = parser.parse_intermixed_args(argv)
    if wrong := next((word for word in args.opts[::2] if "=" in word), None):
        parser.error(f"'{wrong}': flags are --NAME VALUE, such as --epochs 3; overrides KEY VALUE")
    return args


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains or evaluates in this process; returns the results of the last evaluation.

    With ``--eval-only``, files are kept only if the command names an output folder or ``--resume``.
    """
    is_named = args.output or args.resume or "OUTPUT_DIR" in args.opts
    if not args.eval_only or is_named:
        return run(args)
    with tempfile.TemporaryDirectory(prefix="qbheat_evaluate_") as args.output:
        return run(args)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from qbheat_det.core.errors import UserError
    from qbheat_det.engine import RunFlags, Trainer, build_config
    from qbheat_det.engine.plan import find_first_stage, plan_run, start_from
    from qbheat_det.engine.resume import decide_to_resume

    if args.dry_run and args.eval_only:
        raise UserError("--dry-run rehearses training: leave out --eval-only")
    build_trainer = functools.partial(Trainer, allow_partial=args.allow_partial)
    if not args.dry_run:
        args.resume = decide_to_resume(args)
    flags, plan = RunFlags.read(args), ""
    if args.eval_only:
        return evaluate(build_config(flags), flags)
    if args.minutes:
        flags, plan = plan_run(flags, build_trainer)
    cfg, stage = build_config(flags), find_first_stage(flags)
    if args.dry_run:
        print_forecast([build_config(stage), cfg] if stage else [cfg], build_trainer, plan)
        return {}
    if stage:
        train_stage(build_config(stage), stage, f"{plan}\nFirst stage of two")
        flags, plan = start_from(stage, flags), "Second stage of two"
        cfg = build_config(flags)
    return train_stage(cfg, flags, plan, allow_partial=args.allow_partial)


def print_forecast(stages: list[Any], build_trainer: Any, plan: str) -> None:
    """Prints the plan of ``--minutes``, and the forecast of each stage's config."""
    from detectron2.utils import comm

    from qbheat_det.engine.dry_run import ADVICE, dry_run

    reports = [str(dry_run(cfg, build_trainer)) for cfg in stages]
    if comm.is_main_process():
        print("\n\n".join(filter(None, [plan, *reports, ADVICE])))


def train_stage(cfg: Any, flags: Any, message: str, **options: Any) -> dict[str, Any]:
    """Trains one stage of a run. The log of the stage begins with ``message``."""
    from qbheat_det.api.training import train
    from qbheat_det.engine import setup
    from qbheat_det.engine.logs import removes_empty_run

    setup(cfg, flags)
    if message.strip():
        logging.getLogger("qbheat_det").info(message.strip())
    with removes_empty_run(Path(cfg.OUTPUT_DIR)):
        return train(cfg, resume=flags.resume, **options)


def evaluate(cfg: Any, flags: Any) -> dict[str, Any]:
    """Evaluates weights; deploys the model first if ``MODEL.DEPLOY.ENABLED``."""
    import qbheat_det.engine
    from qbheat_det.deployment import deploy_by_config
    from qbheat_det.engine.logs import print_results, removes_empty_run

    def deploy(model: Any) -> Any:
        deployed = deploy_by_config(model, cfg.MODEL.DEPLOY)
        logging.getLogger("qbheat_det").info(f"Deployed:\n{deployed.report}")
        return deployed

    prepare = deploy if cfg.MODEL.DEPLOY.ENABLED else None
    qbheat_det.engine.setup(cfg, flags)
    with removes_empty_run(Path(cfg.OUTPUT_DIR)):
        results = qbheat_det.engine.evaluate(cfg, resume=flags.resume, prepare=prepare)
    if results:  # on the main process
        print_results(results)
    return results


def invoke_main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check_inputs(
        args.data, *args.images, args.val, *args.val_images, *args.unlabelled, weights=args.weights
    )
    from qbheat_det.core.errors import exit_on_user_error
    from qbheat_det.engine import run_distributed

    exit_on_user_error(run_distributed)(main, args)


if __name__ == "__main__":
    invoke_main()

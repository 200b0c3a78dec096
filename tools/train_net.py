#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trains or evaluates whatever a config names.

Examples:
  Train on the built-in toy set:
    tools/train_net.py --config-file configs/demo/toy_retinanet.yaml
  Train on boxes of your own (COCO format; class names and count come from the file):
    tools/train_net.py --config-file configs/custom/retinanet_285M_scratch.yaml \\
        --train-json train.json --train-images images/ --val-json val.json --val-images images/
  Evaluate (with the same --val-json and --val-images, where the data are your own):
    tools/train_net.py --config-file output/config.yaml --eval-only \\
        MODEL.WEIGHTS output/model_final.pth
  Pre-train on images of your own, and watch the loss on images that are held out:
    tools/train_net.py --config-file configs/custom/qb_heat_285M_cpu.yaml --image-folder photos/ \\
        --val-image-folder others/ TEST.EVAL_EPOCHS 5
  Train a classifier on class folders of your own, here on a frozen encoder:
    tools/train_net.py --config-file configs/custom/tran1_285M_probe.yaml \\
        --train-folder train/ --val-folder val/ MODEL.WEIGHTS output/model_final.safetensors
  See in seconds whether a run will work, and how long it will take:
    tools/train_net.py --config-file configs/demo/toy_retinanet.yaml --dry-run
  Continue a run that was stopped, exactly:
    tools/train_net.py --config-file configs/demo/toy_retinanet.yaml --resume
  Eight GPUs, or two processes on the CPU:
    tools/train_net.py --config-file configs/coco/mf_detr_211_285M_probe.yaml --num-gpus 8
    torchrun --nproc-per-node 2 tools/train_net.py --config-file configs/demo/toy_retinanet.yaml
"""

import argparse
import functools
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

# What Detectron2's own imports say would otherwise be the first lines of every run.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
warnings.filterwarnings("ignore", message="torch.meshgrid")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

from detectron2.engine import default_argument_parser  # noqa: E402
from detectron2.utils import comm  # noqa: E402

import qbheat_det  # noqa: E402, F401  registers models and data
from qbheat_det.analysis.curves import draw_training_curves  # noqa: E402
from qbheat_det.core.errors import UserError, exit_on_user_error  # noqa: E402
from qbheat_det.engine import (  # noqa: E402
    Trainer,
    add_data_flags,
    add_image_flags,
    build_config,
    evaluate,
    run_distributed,
    setup,
    write_run_record,
)
from qbheat_det.engine.dry_run import dry_run  # noqa: E402
from qbheat_det.engine.replay import replay_failure  # noqa: E402


def main(args: argparse.Namespace) -> dict[str, Any]:
    if args.dry_run and args.eval_only:
        raise UserError("--dry-run rehearses training: leave out --eval-only")
    if not (args.config_file or args.eval_only):
        raise UserError("name what to train with --config-file; configs/ holds recipes")
    cfg = build_config(args)
    if args.dry_run:
        report = dry_run(cfg, functools.partial(Trainer, allow_partial=args.allow_partial))
        if comm.is_main_process():
            print(report)
        return {}
    setup(cfg, args)
    if args.eval_only:
        return evaluate(cfg, resume=args.resume)
    trainer = Trainer(cfg, allow_partial=args.allow_partial)
    trainer.resume_or_load(resume=args.resume)
    if comm.is_main_process():
        write_run_record(
            trainer.cfg.OUTPUT_DIR,
            command=sys.argv,
            resumed_from=trainer.resumed_from,
            device=trainer.cfg.MODEL.DEVICE,
            processes=comm.get_world_size(),
            seed=trainer.seed,
        )
    results = trainer.train()
    if comm.is_main_process():
        folder = Path(trainer.cfg.OUTPUT_DIR)
        draw_training_curves(folder / "metrics.json", folder / "curves.png")
    return results


@exit_on_user_error
def invoke_main() -> None:
    args = parse_args()
    if args.replay:
        print(replay_failure(args.replay))
        return
    run_distributed(main, args)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = default_argument_parser(epilog=__doc__)
    add_data_flags(parser)
    add_image_flags(parser)
    add_run_flags(parser)
    ours = {
        "opts": "overrides of the config: KEY VALUE pairs, such as SOLVER.IMS_PER_BATCH 4",
        "resume": "continue the run in OUTPUT_DIR; start it where there is none",
        "eval_only": "evaluate MODEL.WEIGHTS, or with --resume the last checkpoint of OUTPUT_DIR",
    }
    for action in parser._actions:
        action.help = ours.get(action.dest, action.help)
        if action.dest == "opts":  # Detectron2 would take flags that follow for overrides
            action.nargs, action.default = "*", []
    return parser.parse_intermixed_args(argv)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("runs that can be trusted")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, train a few steps, evaluate a few images, save and reload, in a "
        "folder that is removed; say what time, memory and disk the whole run will take",
    )
    group.add_argument(
        "--allow-partial",
        action="store_true",
        help="start from MODEL.WEIGHTS even if part of the file fits nowhere in the model",
    )
    group.add_argument(
        "--replay", metavar="FILE", help="run a step again whose loss was not finite: failure_*.pt"
    )


if __name__ == "__main__":
    invoke_main()

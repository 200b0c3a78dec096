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
  Eight GPUs:
    tools/train_net.py --config-file configs/coco/mf_detr_211_285M_probe.yaml --num-gpus 8
"""

import argparse
from typing import Any

from detectron2.engine import default_argument_parser, launch

import qbheat_det  # noqa: F401  registers models and data
from qbheat_det.engine import Trainer, add_data_flags, build_config, check_gpus, evaluate, setup
from qbheat_det.errors import exit_with_sentence


def main(args: argparse.Namespace) -> dict[str, Any]:
    cfg = build_config(args)
    setup(cfg, args)
    if args.eval_only:
        return evaluate(cfg, resume=args.resume)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


@exit_with_sentence
def invoke_main() -> None:
    parser = default_argument_parser(epilog=__doc__)
    add_data_flags(parser)
    args = parser.parse_args()
    check_gpus(args.num_gpus)
    launch(
        main,
        args.num_gpus,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
    )


if __name__ == "__main__":
    invoke_main()

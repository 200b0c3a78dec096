#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reconstruction losses of held-out images without a network, to compare a model's with.

Three predictors, evaluated as QB-Heat is: on the same squares of the same images, each seen once
from a corner (the four in turn) and once from the centre, with the config's loss.

  zero        the mean of each normalised patch; with raw pixels, MODEL.PIXEL_MEAN
  mean image  the mean over the training images of what is to be predicted
  ridge       linear regression from the visible quarter, averaged to 16 x 16 pixels, to all pixels
              of all patches that count; one for each place of the quarter, one penalty a patch,
              chosen on a fifth of the training images

A model that is not clearly below ridge has learned little yet. Training images are their largest
centre squares and, where INPUT.RANDOM_FLIP has it, these mirrored. With normalised patches, a loss
is the share of the variance that is not explained.

examples:
  python tools/reconstruction_baselines.py --config-file custom/qb_heat_285M_cpu.yaml \\
      --images photos/train --val-images photos/val

  # beside checkpoints of a run, with the config that is inside them or in their folder
  python tools/reconstruction_baselines.py --images photos/train \\
      --val-images photos/val --weights output/pretraining/model_0002999.pth \\
      --weights output/pretraining/model_final.safetensors --json output/baselines.json

Time grows with images and pixels: minutes on one core for 5,000 images of 128 pixels a side.
--max-images N draws N of each folder; a million images tell little that 20,000 do not.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import make_parser
from figure_flags import integer

if TYPE_CHECKING:  # imported below after the arguments are parsed
    from detectron2.config import CfgNode

Records = list[dict[str, Any]]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--config-file", metavar="FILE", help="of QB-Heat; without, that of the first weights")
    for flag, what in (("--images", "to learn from"), ("--val-images", "held out")):
        add(
            flag,
            action="append",
            required=True,
            metavar="DIR",
            help=f"images {what}: all in this folder and below it; repeatable",
        )
    add("--weights", action="append", default=[], metavar="FILE", help="of a model; repeatable")
    add("--max-images", type=integer(least=2), metavar="N", help="draw N images of each set")
    add("--json", type=Path, metavar="FILE", help="write all numbers there")
    add("opts", nargs="*", metavar="KEY VALUE", help="overrides of the config")
    args = parser.parse_args(argv)
    if not args.config_file and not args.weights:
        parser.error("give --config-file or --weights: image size, patches and loss are from there")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    from qbheat_det.core.errors import exit_on_user_error

    exit_on_user_error(compare)(args)


def compare(args: argparse.Namespace) -> None:
    """Prints the losses of all baselines and models.

    Raises:
        UserError: a file or config is wrong, or a model is not evaluated as the baselines are.
    """
    from qbheat_det.analysis.reconstruction_baselines import compute_baselines
    from qbheat_det.core.files import check_writable
    from qbheat_det.core.text import join_first

    if args.json:
        check_writable(args.json)
    cfg, models = load_configs(args)
    train = load_records(args.images, args.max_images)
    held_out = load_records(args.val_images, args.max_images)
    # First, since a file that does not fit ends it here.
    own_losses = {file: evaluate_weights(own, held_out) for file, own in models.items()}
    report = compute_baselines(cfg, train, held_out, progress=True)
    losses = dict(report.losses)
    losses |= own_losses
    print(format_table(losses))
    node, size = cfg.MODEL.QB_HEAT, cfg.INPUT.PRETRAIN.SIZE
    target = "normalised patches" if node.NORM_PIXEL_LOSS else "raw pixels"
    print(
        f"\nSquared error of {target} at {node.LOSS_ON} positions, {size} x {size} pixels; mean "
        f"and standard error over {report.num_held_out:,} held-out images. Learned from "
        f"{report.num_images:,} images"
        + (" and their mirror images." if cfg.INPUT.RANDOM_FLIP != "none" else ".")
    )
    if report.skipped:
        names = join_first(sorted(map(str, report.skipped)), 10, "\n  ")
        print(f"\n{len(report.skipped):,} unreadable images:\n  {names}", file=sys.stderr)
    if args.json:
        write_json(args.json, losses, report, find_settings(cfg))


def load_configs(args: argparse.Namespace) -> "tuple[CfgNode, dict[str, CfgNode]]":
    """Returns the config of the baselines, and that of each model by its file.

    Raises:
        UserError: a model is not evaluated as the baselines are.
    """
    from qbheat_det.checkpoint import load_run_config
    from qbheat_det.config import load_config
    from qbheat_det.core.errors import UserError

    models = {file: load_run_config(file, opts=args.opts) for file in args.weights}
    cfg = (
        load_config(args.config_file, args.opts)
        if args.config_file
        else models[args.weights[0]].clone()
    )
    expected = find_settings(cfg)
    for file, own in models.items():
        for key, value in find_settings(own).items():
            if value != expected[key]:
                raise UserError(
                    f"'{file}' was trained with {key} {value}, but the baselines are computed with "
                    f"{expected[key]}: their losses cannot be compared"
                )
    return cfg, models


def find_settings(cfg: "CfgNode") -> dict[str, Any]:
    """Returns what a held-out loss depends on besides the predictor."""
    from qbheat_det.analysis.reconstruction_baselines import ReconstructionTask

    task, node = ReconstructionTask.from_config(cfg), cfg.MODEL.QB_HEAT
    return {
        "INPUT.PRETRAIN.SIZE": task.image_size,
        "INPUT.FORMAT": cfg.INPUT.FORMAT,
        "MODEL.PIXEL_MEAN": list(cfg.MODEL.PIXEL_MEAN),
        "MODEL.PIXEL_STD": list(cfg.MODEL.PIXEL_STD),
        "MODEL.QB_HEAT.VISIBLE": task.visible,
        "MODEL.QB_HEAT.LOSS_ON": node.LOSS_ON,
        "MODEL.QB_HEAT.NORM_PIXEL_LOSS": node.NORM_PIXEL_LOSS,
        "patch size": task.patch_size,
    }


def load_records(folders: Sequence[str], max_images: int | None) -> Records:
    """Returns records of all images, or of ``max_images`` drawn at random, always the same."""
    import random

    from qbheat_det.data import load_image_folders

    records, _ = load_image_folders(folders)
    if max_images is None or len(records) <= max_images:
        return records
    chosen = sorted(random.Random(0).sample(range(len(records)), max_images))
    return [records[i] for i in chosen]


def evaluate_weights(cfg: "CfgNode", held_out: Records) -> dict[str, float]:
    """Returns the metrics of ``MODEL.WEIGHTS``, on the batches of evaluation in training.

    Raises:
        UserError: the weights do not fit the model of the config exactly.
    """
    import torch
    from detectron2.modeling import build_model
    from tqdm import tqdm

    from qbheat_det.checkpoint import ExactCheckpointer
    from qbheat_det.data import ImageBatches, build_mapper, with_views
    from qbheat_det.evaluation import HeldOutLossEvaluator
    from qbheat_det.modeling.contracts import get_views

    model = build_model(cfg).eval()
    ExactCheckpointer(model).load(cfg.MODEL.WEIGHTS)
    batches = ImageBatches(
        with_views(held_out, get_views(cfg).values()),
        mapper=build_mapper(cfg, is_train=False),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )
    evaluator = HeldOutLossEvaluator("held-out images")
    with torch.inference_mode():
        for batch in tqdm(batches, desc=Path(cfg.MODEL.WEIGHTS).name, unit=" batches"):
            evaluator.process(batch, model(batch))
    return evaluator.evaluate()["reconstruction"]


def format_table(losses: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a row for each predictor: losses by view, their mean and its standard error."""
    from tabulate import tabulate

    columns = list(losses["zero"])
    rows = [[name, *(f"{own[key]:.4f}" for key in columns)] for name, own in losses.items()]
    return tabulate(rows, ["", *(key.replace("_", " ") for key in columns)], disable_numparse=True)


def write_json(
    path: Path,
    losses: Mapping[str, Mapping[str, float]],
    report: Any,
    settings: Mapping[str, Any],
) -> None:
    import json
    from dataclasses import asdict

    from qbheat_det.core.figures import to_json
    from qbheat_det.core.files import write_atomically

    content = to_json(
        {
            "losses": losses,
            "settings": settings,
            "held_out_images": report.num_held_out,
            "training_images": report.num_images,
            "ridge_penalties": report.penalties,
            "unreadable": [asdict(fault) for fault in report.skipped.values()],
        }
    )
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()

#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the reconstruction loss of held-out images is without a network, to read a model's beside.

Three predictors, judged as QB-Heat is: on the same squares of the same images, each seen once from
a corner (the four in turn) and once from the centre, with the config's loss.

  zero        the mean of each normalised patch; with raw pixels, the mean colour
  mean image  the mean over the training images of what is to be predicted
  ridge       linear regression from the visible quarter, averaged to 16 x 16 pixels, to all pixels
              of all patches that count; one for each place of the quarter, one penalty a patch,
              chosen on a fifth of the training images

A model that is not clearly below ridge has learned little yet. Training images are their largest
centre squares and, where INPUT.RANDOM_FLIP has it, these mirrored; --augmentations adds crops.
With normalised patches, a loss is the share of the variance that is not explained.

examples:
  python tools/reconstruction_baselines.py --config-file configs/custom/qb_heat_285M_cpu.yaml \\
      --image-folder photos/train --val-image-folder photos/val

  # beside checkpoints of a run, with the config that is inside them or in their folder
  python tools/reconstruction_baselines.py --image-folder photos/train \\
      --val-image-folder photos/val --weights output/pretraining/model_0002999.pth \\
      --weights output/pretraining/model_final.safetensors --json output/baselines.json

Time grows with images and pixels: minutes on one core for 5,000 images of 128 pixels a side.
--max-images N draws N of each folder; a million images say little that 20,000 do not.
"""

import argparse
import json
import logging
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from tqdm import tqdm

import qbheat_det  # noqa: F401  (registers models and data sets)
from qbheat_det.analysis.held_out_losses import HeldOutLosses
from qbheat_det.analysis.reconstruction_baselines import BaselineReport, compute_baselines
from qbheat_det.analysis.reconstruction_task import ReconstructionTask
from qbheat_det.checkpoint import ExactCheckpointer, load_run_config
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError, exit_on_user_error
from qbheat_det.core.files import write_atomically
from qbheat_det.data import ImageBatches, build_mapper, load_image_folders, with_views
from qbheat_det.modeling.contracts import get_views

_NAMED = 10  # images that cannot be read, on the terminal

Records = list[dict[str, Any]]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config-file", metavar="FILE", help="of QB-Heat; without, that of the first weights")
    for flag, what in (("--image-folder", "to learn from"), ("--val-image-folder", "held out")):
        add(
            flag,
            action="append",
            required=True,
            metavar="DIR",
            help=f"images {what}: all in this folder and below it; repeatable",
        )
    add("--weights", action="append", default=[], metavar="FILE", help="of a model; repeatable")
    add(
        "--augmentations",
        type=int,
        default=0,
        metavar="K",
        help="random crops of each training image besides its centre square (default: 0)",
    )
    add("--max-images", type=int, metavar="N", help="draw N images of each of the two sets")
    add(
        "--memory-gb",
        type=float,
        default=2.0,
        metavar="GB",
        help="for the sums of ridge regression (default: 2); with less, images are read again",
    )
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("opts", nargs="*", metavar="KEY VALUE", help="overrides of the config")
    args = parser.parse_args(argv)
    if args.augmentations < 0:
        parser.error("--augmentations must be 0 or more")
    if args.max_images is not None and args.max_images < 2:
        parser.error("--max-images must be 2 or more")
    if args.json and args.json.is_dir():
        parser.error(f"--json names a file, but '{args.json}' is a folder")
    return args


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    logging.getLogger("fvcore").setLevel(logging.WARNING)
    cfg, models = _load_configs(args)
    train = _load_records(args.image_folder, args.max_images)
    held_out = _load_records(args.val_image_folder, args.max_images)
    # First, since a file that does not fit ends it here.
    own_losses = {file: evaluate_weights(own, held_out) for file, own in models.items()}
    began = time.perf_counter()
    report = compute_baselines(
        cfg,
        train,
        held_out,
        num_crops=args.augmentations,
        memory_gb=args.memory_gb,
        progress=True,
    )
    seconds = time.perf_counter() - began
    losses = dict(report.losses)
    for file, own in own_losses.items():
        losses[file] = own
        losses[f"{file} - ridge"] = losses[file].minus(losses["ridge"])
    print(format_table(losses))
    print(
        f"\n{describe(cfg)}; mean and standard error over {losses['zero'].num_images:,} held-out "
        f"images. Learned from {report.num_images:,} images ({report.num_rows:,} with crops and "
        f"mirror images) in {seconds:.0f} s."
    )
    _print_faults([fault.message for fault in report.faults.values()])
    if args.json:
        content = _as_json(losses, report, cfg, seconds)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=2) + "\n"
        write_atomically(args.json, lambda stream: stream.write(text.encode()))


def _load_configs(args: argparse.Namespace) -> tuple[CfgNode, dict[str, CfgNode]]:
    """Returns the config of the baselines, and that of each model by its file.

    Raises:
        UserError: a model is not evaluated as the baselines are, so that losses cannot be compared.
    """
    if not args.config_file and not args.weights:
        raise UserError(
            "give --config-file, such as configs/custom/qb_heat_285M_cpu.yaml, or --weights: image "
            "size, patches and loss are taken from there"
        )
    models = {file: load_run_config(file, opts=args.opts) for file in args.weights}
    cfg = (
        load_config(args.config_file, args.opts)
        if args.config_file
        else models[args.weights[0]].clone()
    )
    expected = _find_settings(cfg)
    for file, own in models.items():
        for key, value in _find_settings(own).items():
            if value != expected[key]:
                raise UserError(
                    f"'{file}' was trained with {key} {value}, but the baselines are computed with "
                    f"{expected[key]}: their losses cannot be compared"
                )
    return cfg, models


def _find_settings(cfg: CfgNode) -> dict[str, Any]:
    """Returns what a held-out loss depends on besides the predictor."""
    task, node = ReconstructionTask.from_config(cfg), cfg.MODEL.QB_HEAT
    return {
        "INPUT.PRETRAIN.SIZE": task.image_size,
        "INPUT.FORMAT": cfg.INPUT.FORMAT,
        "MODEL.PIXEL_MEAN": list(cfg.MODEL.PIXEL_MEAN),
        "MODEL.PIXEL_STD": list(cfg.MODEL.PIXEL_STD),
        "MODEL.QB_HEAT.VISIBLE": task.visible,
        "MODEL.QB_HEAT.LOSS_ON": node.LOSS_ON,
        "MODEL.QB_HEAT.NORM_PIXEL_LOSS": node.NORM_PIXEL_LOSS,
        "patches of side": task.patch_size,
    }


def _load_records(folders: Sequence[str], max_images: int | None) -> Records:
    records, _ = load_image_folders(folders)
    if max_images is None or len(records) <= max_images:
        return records
    chosen = sorted(random.Random(0).sample(range(len(records)), max_images))
    return [records[i] for i in chosen]


def evaluate_weights(cfg: CfgNode, held_out: Records) -> HeldOutLosses:
    """Returns the losses of ``MODEL.WEIGHTS``, on the batches that evaluation in training has.

    Raises:
        UserError: the weights do not fit the model of the config exactly.
    """
    model = build_model(cfg).eval()
    ExactCheckpointer(model).load(cfg.MODEL.WEIGHTS)
    batches = ImageBatches(
        with_views(held_out, get_views(cfg).values()),
        mapper=build_mapper(cfg, is_train=False),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )
    losses = HeldOutLosses()
    with torch.inference_mode():
        for batch in tqdm(batches, desc=Path(cfg.MODEL.WEIGHTS).name, unit=" batches"):
            outputs = model(batch)
            losses.add(batch, torch.stack([output["loss_reconstruction"] for output in outputs]))
    return losses


def format_table(losses: Mapping[str, HeldOutLosses]) -> str:
    """Returns a row for each predictor: loss ± standard error by view."""
    rows = {name: values.summarise() for name, values in losses.items()}
    views = list(next(iter(rows.values())))
    width = max(map(len, rows))
    lines = [f"{'':<{width}}" + "".join(f"  {view:>15}" for view in views)]
    for name, figures in rows.items():
        cells = (f"{mean:.4f} ± {error:.4f}" for mean, error in figures.values())
        lines.append(f"{name:<{width}}" + "".join(f"  {cell:>15}" for cell in cells))
    return "\n".join(lines)


def describe(cfg: CfgNode) -> str:
    """Returns in words what the loss is."""
    node, size = cfg.MODEL.QB_HEAT, cfg.INPUT.PRETRAIN.SIZE
    target = "normalised patches" if node.NORM_PIXEL_LOSS else "raw pixels"
    where = "masked positions" if node.LOSS_ON == "masked" else "all positions"
    return f"Squared error of {target} at {where}, {size} x {size} pixels"


def _print_faults(sentences: Sequence[str]) -> None:
    if not sentences:
        return
    print(f"\n{len(sentences):,} images cannot be read and were left out:", file=sys.stderr)
    for sentence in sorted(sentences)[:_NAMED]:
        print(f"  {sentence.encode(errors='backslashreplace').decode()}", file=sys.stderr)
    if len(sentences) > _NAMED:
        print(f"  and {len(sentences) - _NAMED:,} more (--json lists them all)", file=sys.stderr)


def _as_json(
    losses: Mapping[str, HeldOutLosses], report: BaselineReport, cfg: CfgNode, seconds: float
) -> dict[str, Any]:
    return {
        "losses": {
            name: {
                view: {"loss": mean, "standard_error": error if error == error else None}
                for view, (mean, error) in values.summarise().items()
            }
            for name, values in losses.items()
        },
        "settings": _find_settings(cfg),
        "held_out_images": losses["zero"].num_images,
        "training_images": report.num_images,
        "training_rows": report.num_rows,
        "ridge_penalties": report.penalties,
        "seconds_of_baselines": round(seconds, 1),
        "unreadable": [asdict(fault) for fault in report.faults.values()],
    }


if __name__ == "__main__":
    main()

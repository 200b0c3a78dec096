# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The stage of a comparison that writes backbones, run by ``python -m`` with this module's name.

One as it was trained or initialised, and one whose BatchNorms have their statistics from whole
images, with the same draw of images and the same size for every objective.
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from fvcore.nn.precise_bn import BN_MODULE_TYPES

from qbheat_det.analysis import count_parameters
from qbheat_det.checkpoint import WeightsInfo, load_run_config, save_weights
from qbheat_det.config import load_config
from qbheat_det.core.errors import exit_on_user_error
from qbheat_det.core.files import write_atomically
from qbheat_det.data import load_image_folders, preserved_randomness
from qbheat_det.export import export_backbone
from qbheat_det.modeling.backbone.fpn import build_bare_backbone

from ..run_record import find_commit
from .encoder_cost import count_encoder_madds, count_training_madds
from .figures import BACKBONE_FIGURES

# Whole images as every consumer sees them, whatever the objective itself was shown.
_WHOLE = ("INPUT.DATASET_MAPPER_NAME", "pretrain")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--config-file", required=True, help="of the objective")
    add("--weights", help="of pre-training; without, the backbone is initialised")
    add("--seed", type=int, required=True, help="of that initialisation")
    add("--train-folder", required=True, help="class folders")
    add("--recalibrate-bn", type=int, required=True, help="whole images for the statistics")
    add("--output", type=Path, required=True, help="folder")
    add("opts", nargs="*", default=[])
    return parser.parse_intermixed_args(argv)


def write_backbones(args: argparse.Namespace) -> dict[str, Any]:
    """Writes both files, and what was measured on the way; returns that."""
    if args.weights:
        cfg = load_run_config(args.weights)
        weights = args.weights
    else:
        cfg = load_config(args.config_file, args.opts)
        weights = str(_write_initialised(cfg, args.output / "initialised.safetensors", args.seed))
    as_stored, recalibrated = (
        args.output / f"{name}.safetensors" for name in ("as_stored", "recalibrated")
    )
    export_backbone(weights, as_stored, overwrite=True)
    backbone = build_bare_backbone(cfg).cpu()
    norms = sum(isinstance(module, BN_MODULE_TYPES) for module in backbone.modules())
    estimated = args.recalibrate_bn if norms else 0
    _, num_images = export_backbone(
        weights,
        recalibrated,
        overwrite=True,
        num_images=estimated,
        image_folders=[args.train_folder] if estimated else [],
        opts=_WHOLE if estimated else [],
    )
    size = cfg.INPUT.PRETRAIN.SIZE
    records, _ = load_image_folders([args.train_folder], labelled=True)
    return {
        "batch_norms": norms,
        "recalibrated_images": num_images,
        "image_size": size,
        "parameters": count_parameters(backbone),
        "madds_of_a_whole_image": count_encoder_madds(backbone, size, size),
        "madds_of_training": count_training_madds(cfg, records) if args.weights else None,
        "commit": find_commit(),
    }


def _write_initialised(cfg: CfgNode, path: Path, seed: int) -> Path:
    with preserved_randomness():
        torch.manual_seed(seed)
        backbone = build_bare_backbone(cfg)
    state = {f"backbone.{name}": value for name, value in backbone.state_dict().items()}
    # The iteration before the first: no image went into these weights.
    info = WeightsInfo.from_config(cfg, iteration=-1, commit=find_commit())
    save_weights(str(path), state, info)
    return path


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    text = json.dumps(write_backbones(args), indent=1).encode()
    write_atomically(args.output / BACKBONE_FIGURES, lambda stream: stream.write(text))


if __name__ == "__main__":
    main()

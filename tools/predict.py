#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Predict on images, folders and videos with trained weights: boxes, or classes of images.

examples:
  # the weights of a run hold the config and the names of the classes
  python tools/predict.py --weights output/demo/training/model_final.safetensors \\
      --input photo.jpg --output output/pictures

  # a folder (searched recursively) and a video; boxes as a COCO results file, too
  python tools/predict.py --weights output/run/model_final.pth \\
      --input photos/ clip.mp4 --output output/pictures --json output/boxes.json

  # every box that the model gives, under the image ids of an annotation file: what AP needs
  python tools/predict.py --weights output/run/model_final.pth --input val2017/ \\
      --json output/val.json --image-ids-from instances_val2017.json --score-threshold 0

  # config keys can be overridden: here, larger test images
  python tools/predict.py --weights output/run/model_final.pth --input photo.jpg \\
      --output output/pictures INPUT.MIN_SIZE_TEST 1000

  # the fastest equal form; an image size that comes 300 times is compiled, a minute or two once
  python tools/predict.py --weights output/run/model_final.pth --input photos/ \\
      --json output/boxes.json --fast

  # with the weights of a classifier: the five likeliest classes of each image
  python tools/predict.py --weights output/run/model_final.pth --input photos/ \\
      --json output/classes.json

  # a file of tools/export.py: ONNX (run by onnxruntime), or torch.export, which is a program: open
  # only files you trust
  python tools/predict.py --weights output/model.onnx --input photos/ --output output/pictures

exit code: 0; 1 if a file could not be used and was skipped; 2 if nothing could be done.
"""

import argparse
import sys
import warnings
from pathlib import Path

# What Detectron2's own imports and torch.meshgrid say is of no use to people who predict.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
warnings.filterwarnings("ignore", message="torch.meshgrid")

import numpy as np  # noqa: E402
from detectron2.config import CfgNode  # noqa: E402
from detectron2.engine import DefaultPredictor  # noqa: E402
from detectron2.structures import Instances  # noqa: E402

from qbheat_det.analysis.box_drawing import draw_instances  # noqa: E402
from qbheat_det.checkpoint import load_run_config  # noqa: E402
from qbheat_det.core.errors import UserError, exit_on_user_error  # noqa: E402
from qbheat_det.data import MAPPERS_OF_IMAGES  # noqa: E402
from qbheat_det.deployment import deploy_by_config  # noqa: E402
from qbheat_det.engine.classify import classify_files, is_classifier  # noqa: E402
from qbheat_det.engine.media import (  # noqa: E402
    Image,
    MediaFile,
    find_media,
)
from qbheat_det.engine.predict import (  # noqa: E402
    MediaPredictor,
    PredictionReport,
    build_predictor,
    read_image_ids,
    write_json,
)
from qbheat_det.export import (  # noqa: E402
    ExportedModel,
    ExportedPredictor,
    classify_exported,
    is_exported,
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    summary, examples = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--weights", required=True, help="trained weights (.safetensors, .pth) or exported file")
    add("--config-file", help="YAML of the model (default: the one inside the weights, or beside)")
    add("--input", nargs="+", required=True, metavar="PATH", help="images, folders, videos")
    add("--output", type=Path, metavar="DIR", help="folder for the drawn pictures and videos")
    add(
        "--json", type=Path, metavar="FILE", help="write boxes in COCO's results format, or classes"
    )
    add("--image-ids-from", metavar="FILE", help="COCO annotations that say each image's id")
    add("--score-threshold", type=float, default=0.3, help="leave out boxes below (default 0.3)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    add(
        "--fast",
        action="store_true",
        help="predict by the model's fastest equal form on this device (MODEL.DEPLOY.ENABLED)",
    )
    add("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config overrides, last")
    args = parser.parse_args(argv)
    if args.output is None and args.json is None:
        parser.error("nothing to write: name --output DIR, --json FILE or both")
    if not 0 <= args.score_threshold <= 1:
        parser.error("--score-threshold is a probability: from 0 to 1")
    return args


@exit_on_user_error
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    exported = open_file(args) if is_exported(args.weights) else None
    cfg = exported.load_config() if exported else load_config_of_weights(args)
    media = find_media(args.input, exclude=args.output)
    image_ids = read_image_ids(args.image_ids_from, media) if args.image_ids_from else None
    if args.json and args.json.is_dir():
        raise UserError(f"--json '{args.json}' is a folder: name a file")
    if is_classifier(cfg):
        return classify(exported, cfg, args, media)
    if not exported and cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_IMAGES:
        raise UserError(
            f"'{args.weights}' are weights of pre-training ({cfg.MODEL.META_ARCHITECTURE}), which "
            "predict neither boxes nor classes: train a detector or a classifier on them "
            "(MODEL.WEIGHTS of tools/train_net.py), or probe them with tools/probe_backbone.py"
        )
    predictor = ExportedPredictor(exported) if exported else build_fast_or_plain(cfg)
    if args.json and not cfg.MODEL.CATEGORY_IDS:
        print("note: the config lists no MODEL.CATEGORY_IDS, so category ids count from 1")

    names = cfg.MODEL.CLASS_NAMES

    def draw(image: Image, instances: Instances) -> Image:
        picture = draw_instances(np.ascontiguousarray(image[:, :, ::-1]), instances, names)
        return np.ascontiguousarray(picture[:, :, ::-1])

    run = MediaPredictor(
        predictor,
        cfg=cfg,
        score_threshold=args.score_threshold,
        output_dir=args.output,
        draw=draw,
    )
    run.run(media, image_ids)
    if args.json:
        write_json(args.json, run.results)
    print_report(run.report, args)
    return 1 if run.report.skipped else 0


def load_config_of_weights(args: argparse.Namespace) -> CfgNode:
    opts = [*args.opts, *(["MODEL.DEPLOY.ENABLED", "True"] if args.fast else [])]
    return load_run_config(args.weights, args.config_file, device=args.device, opts=opts)


def build_fast_or_plain(cfg: CfgNode) -> DefaultPredictor:
    if not cfg.MODEL.DEPLOY.ENABLED:
        return build_predictor(cfg)
    predictor = build_predictor(cfg, lambda model: deploy_by_config(model, cfg.MODEL.DEPLOY))
    print(predictor.model.report, file=sys.stderr)
    return predictor


def open_file(args: argparse.Namespace) -> ExportedModel:
    if args.fast:
        raise UserError(
            f"'{args.weights}' is a program already: leave out --fast, which is for weights"
        )
    if args.config_file or args.opts:
        raise UserError(
            f"'{args.weights}' was exported with its config inside, which is fixed: leave out "
            "--config-file and config overrides, or export the weights again with them"
        )
    return ExportedModel.open(args.weights, device=args.device)


def classify(
    exported: ExportedModel | None, cfg: CfgNode, args: argparse.Namespace, media: list[MediaFile]
) -> int:
    if args.output or args.image_ids_from:
        raise UserError(
            f"'{args.weights}' is a classifier, which finds no boxes: leave out --output and "
            "--image-ids-from, and name --json FILE for the classes"
        )
    if exported:
        found = classify_exported(exported, media)
    else:
        found = classify_files(build_fast_or_plain(cfg).model, cfg, media)
    write_json(args.json, found.results)
    print(f"classes of {len(found.results)} images: {args.json}")
    print_skipped(found.skipped)
    return 1 if found.skipped else 0


def print_report(report: PredictionReport, args: argparse.Namespace) -> None:
    frames = f" and {report.num_frames} video frames" if report.num_frames else ""
    threshold = f"with a score of {args.score_threshold} or more"
    print(f"{report.num_boxes} boxes {threshold} on {report.num_images} images{frames}")
    if args.output:
        print(f"pictures: {args.output}")
    if args.json:
        hint = " (for AP, take all boxes: --score-threshold 0)" if args.score_threshold else ""
        print(f"results:  {args.json}{hint}")
    print_skipped(report.skipped)


def print_skipped(skipped: list[tuple[str, str]]) -> None:
    for path, reason in skipped:
        print(f"skipped {path}: {reason}", file=sys.stderr)
    if skipped:
        print(f"{len(skipped)} files could not be read", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

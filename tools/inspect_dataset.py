#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Looks at the data of a config before hours of training: what it holds, and what is wrong.

Counts images, boxes and classes, measures boxes in the pictures and where the network sees them,
opens every image file, looks for pictures that are in training and in evaluation, and draws
training images as the model sees them, augmented by the config. Prints a summary and writes
report.html, a page that holds all its pictures, and faults.txt, a line for each fault.

examples:
  python tools/inspect_dataset.py --config-file configs/demo/toy_retinanet.yaml
  python tools/inspect_dataset.py --config-file configs/custom/mf_detr_211_285M_scratch.yaml \\
      --train-json train.json --train-images images --val-json val.json --val-images images
  python tools/inspect_dataset.py --train-json train.json --train-images images
  python tools/inspect_dataset.py --config-file configs/coco/mf_detr_211_285M_probe.yaml \\
      --num-samples 24 --output output/coco INPUT.MIN_SIZE_TRAIN "(320,)"

exit code: 0 where nothing is wrong, 1 where there are faults, 2 where a file or key that was given
does not exist. Warnings are no faults: training copes with what they name.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

# What Detectron2's own imports say would otherwise be the first thing that the tool shows.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")

from arguments import add_data_flags  # noqa: E402
from detectron2.config import CfgNode  # noqa: E402

from qbheat_det.analysis.dataset_inspection import (  # noqa: E402
    DatasetSource,
    Inspection,
    compare_datasets,
    inspect_dataset,
)
from qbheat_det.analysis.dataset_pictures import draw_samples  # noqa: E402
from qbheat_det.analysis.dataset_report import (  # noqa: E402
    DatasetReport,
    describe_datasets,
    format_report,
)
from qbheat_det.analysis.html_report import Picture, write_report  # noqa: E402
from qbheat_det.config import load_config  # noqa: E402
from qbheat_det.core.errors import UserError, exit_on_user_error  # noqa: E402


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config-file", metavar="FILE", help="YAML; without, Detectron2's defaults"
    )
    add_data_flags(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/inspect_dataset"),
        metavar="DIR",
        help="folder of the page (default: output/inspect_dataset)",
    )
    parser.add_argument(
        "--num-samples", type=int, default=12, metavar="N", help="pictures to draw (default: 12)"
    )
    parser.add_argument(
        "--num-threads", type=int, default=8, metavar="N", help="files at a time (default: 8)"
    )
    parser.add_argument(
        "opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config overrides, last"
    )
    args = parser.parse_args(argv)
    if args.num_threads < 1 or args.num_samples < 0:
        parser.error("--num-threads must be 1 or more, and --num-samples 0 or more")
    return args


def list_sources(cfg: CfgNode, args: argparse.Namespace) -> list[DatasetSource]:
    """Returns the datasets of the flags, or else those of the config; training sets first.

    Raises:
        UserError: a flag stands without its partner, or there is nothing to look at.
    """
    flags = (
        ("train", args.train_json, args.train_images),
        ("val", args.val_json, args.val_images),
    )
    for role, json_file, images in flags:
        if bool(json_file) != bool(images):
            raise UserError(f"--{role}-json and --{role}-images go together")
    sources = [
        DatasetSource(role, role, json_file, images)
        for role, json_file, images in flags
        if json_file
    ]
    if not sources:
        sources = [DatasetSource(name, "train") for name in cfg.DATASETS.TRAIN]
        sources += [DatasetSource(name, "val") for name in cfg.DATASETS.TEST]
    if not sources:
        raise UserError("the config names no dataset: give --train-json and --train-images")
    return sources


def draw_training_images(
    inspections: Sequence[Inspection], cfg: CfgNode, num_samples: int
) -> list[Picture]:
    """Draws images of the training set, or of the first set where there is none."""
    if not num_samples:
        return []
    first = inspections[0]
    class_names = first.statistics.class_names
    seed = max(cfg.SEED, 0)
    return draw_samples(first.records, cfg, class_names, num_samples=num_samples, seed=seed)


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 without faults, 1 with some."""
    args = parse_args(argv)
    logging.disable(logging.WARNING)  # what loaders and mappers log is in the summary
    cfg = load_config(args.config_file, args.opts)
    inspections = [
        inspect_dataset(source, cfg, num_threads=args.num_threads, progress=True)
        for source in list_sources(cfg, args)
    ]
    faults, warnings = compare_datasets(inspections)
    report = DatasetReport(
        title=f"Data of {args.config_file or 'the files given'}",
        inspections=inspections,
        faults=[fault for one in inspections for fault in one.faults] + faults,
        warnings=[text for one in inspections for text in one.warnings] + warnings,
        cfg=cfg,
    )
    samples = draw_training_images(inspections, cfg, args.num_samples)
    write_report(describe_datasets(report, samples), args.output / "report.html")
    lines = "".join(f"{fault.message}\n" for fault in report.faults)
    (args.output / "faults.txt").write_text(lines, encoding="utf-8", errors="backslashreplace")
    print(format_report(report))
    print(f"\nopen  {(args.output / 'report.html').resolve()}")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())

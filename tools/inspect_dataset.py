#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Check datasets before training, and find labels that are probably wrong.

Counts images, boxes and classes, measures boxes, reads every image file, and searches for images
that are in both the training set and the validation set. Prints a summary, and writes errors.txt
(one line per error) and samples.jpg (training images after the augmentation of the config; the
headings state the sizes of the image files). Without --config-file, the config is the recipe that
qbheat train chooses for --data.

examples:
  qbheat inspect --config-file quick_schedules/retinanet_small_cells.yaml
  qbheat inspect --config-file custom/mf_detr_211_285M_scratch.yaml \\
      --data train.json --val val.json --images images
  qbheat inspect --data train.json

  # find labels that are probably wrong with two detectors, each trained on half of the images
  qbheat inspect --labels --data train.json --output suspects/
  qbheat inspect --labels --data train.json --weights output/mine --output suspects/
  qbheat inspect --apply suspects/corrections.json --data train.json --output corrected/

--labels writes suspects.html, a page where you select the actual errors and save corrections.json,
and suspects.json with all proposals of the page. Files of these two names are replaced, and
corrections.json is not. The page lists the suspects with a probability of at least 10 %, but at
least 20 and at most 200. --most 500 lists the 500 most probable ones.
--apply writes the corrected labels to annotations.json in the output folder, in COCO's format. It
does not change the data set.

exit code: 0 if there are no errors; 1 if there are errors; 2 if a file or key does not exist.
Warnings do not count as errors, because training can handle such data.
"""

import argparse
import dataclasses
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from arguments import WEIGHTS, add_data_flags, check_inputs, make_parser

_POOR_AP50 = 10.0  # percent; detectors below this find no missing boxes


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--config-file", metavar="FILE", help="YAML config (default: as for qbheat train)")
    add_data_flags(parser)
    add(
        "--output",
        type=Path,
        default=Path("output/inspect_dataset"),
        metavar="DIR",
        help="output folder (default: output/inspect_dataset)",
    )
    add("--labels", action="store_true", help="find labels that are probably wrong")
    add(
        "--weights",
        default="",
        metavar="W",
        help="with --labels: a model whose encoder the "
        f"detectors use: {WEIGHTS} (default: EfficientNet-Lite0 trained on ImageNet)",
    )
    add(
        "--most",
        type=int,
        metavar="N",
        help="with --labels: list the N most probable errors "
        "(default: those of at least 10 %%, but at least 20 and at most 200)",
    )
    add("--apply", type=Path, metavar="FILE", help="apply these corrections and write a COCO file")
    add(
        "--num-samples",
        type=int,
        default=12,
        metavar="N",
        help="number of images in samples.jpg (default: 12)",
    )
    parser.add_overrides("overrides of the config, such as INPUT.TILE 640")
    args = parser.parse_args(argv)
    args.labels = args.labels or bool(args.weights)
    if args.num_samples < 0:
        parser.error("--num-samples must be 0 or more")
    if (args.labels or args.apply) and not args.data:
        parser.error("--labels and --apply need --data")
    if (args.labels or args.apply) and len(args.data) > 1:
        parser.error("--labels and --apply take one --data: inspect each data set by itself")
    if (args.labels or args.apply) and args.class_map:
        parser.error("--labels and --apply keep the classes of --data: leave out --class-map")
    if args.most is not None and (args.most < 1 or not args.labels):
        parser.error("--most must be 1 or more, and needs --labels")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    paths = [*args.data, *args.images, *args.val, *args.val_images]
    check_inputs(
        *paths,
        args.class_map,
        args.apply,
        weights=[args.weights],
        config_file=args.config_file,
    )
    from qbheat_det.core.errors import exit_on_user_error

    if args.apply:
        return exit_on_user_error(correct)(args)
    if args.labels:
        return exit_on_user_error(find_suspects)(args)
    return exit_on_user_error(inspect)(args)


def find_suspects(args: argparse.Namespace) -> int:
    """Finds labels that are probably wrong, and writes the page of suspects.

    Prints how good the detectors are, and where the page is. Returns the exit code.
    """
    from qbheat_det.labelling import SUSPECT_FILES, inspect_labels, shortlist, write_suspects

    replaced = [name for name in SUSPECT_FILES if (args.output / name).exists()]
    if replaced:
        print(f"'{args.output}' has files of an earlier search; replaced are {', '.join(replaced)}")
    images = first_images(args)
    labels, suspects, ap50 = inspect_labels(
        args.data[0],
        args.output,
        images=images,
        encoder=args.weights,
        opts=args.opts,
        max_left_out=args.max_left_out,
    )
    words = ["qbheat", "inspect", "--apply", "corrections.json", "--data", args.data[0]]
    if images:
        words += ["--images", images]
    if args.max_left_out is not None:
        words += ["--max-left-out", str(args.max_left_out)]
    command = shlex.join([*words, "--output", str(args.output / "corrected")])
    listed = shortlist(suspects, args.most)
    page = write_suspects(labels, listed, args.output, command, num_found=len(suspects))
    print(
        f"The detectors have AP50 {ap50[0]:.1f} and {ap50[1]:.1f} on the half that they "
        f"were not trained on. Listed are {len(listed):,} of {len(suspects):,} candidates, "
        f"most probable first: {page}"
    )
    if max(ap50) < _POOR_AP50:
        print("Such poor detectors find no missing boxes: label more images first")
    return 0


def first_images(args: argparse.Namespace) -> str:
    """Returns the first folder of ``--images``, or "" if there is none."""
    if args.images:
        return args.images[0]
    return ""


def correct(args: argparse.Namespace) -> int:
    """Writes the corrected COCO file, and prints a summary. Returns the exit code."""
    from qbheat_det.core.text import escape_controls
    from qbheat_det.labelling import apply_corrections

    summary = apply_corrections(
        args.apply,
        args.data[0],
        args.output / "annotations.json",
        first_images(args),
        max_left_out=args.max_left_out,
    )
    print(escape_controls(str(summary)))
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Prints the summary, writes the files, and returns the exit code."""
    from qbheat_det.analysis.datasets import (
        account_for,
        compare_datasets,
        draw_samples,
        format_report,
        inspect_dataset,
        list_sources,
        load_recipe,
    )
    from qbheat_det.analysis.figures import Image
    from qbheat_det.core.files import write_atomically
    from qbheat_det.core.text import escape_controls, join_first
    from qbheat_det.data import LEFT_OUT_FILE, DataError
    from qbheat_det.engine import RunFlags
    from qbheat_det.engine.opened_sources import check_flags, find_unvalidated, open_sources
    from qbheat_det.tasks import DETECTION

    logging.disable(logging.WARNING)  # the summary includes what loaders and mappers log
    # In ``RunFlags``, ``output`` is the folder of a training, but here it is that of the report.
    flags = dataclasses.replace(RunFlags.from_args(args), output="")
    cfg, recipe = load_recipe(flags)
    check_flags(flags, DETECTION)
    opened = open_sources(flags)
    sources = list_sources(cfg, flags, opened)
    inspections = [inspect_dataset(source, cfg) for source in sources]
    account = account_for(inspections)
    errors: list[DataError] = [*account.faults]
    for inspection in inspections:
        errors += inspection.errors
    shared_errors, warnings = compare_datasets(inspections)
    errors += shared_errors
    text = "".join(f"{error.message}\n" for error in errors)
    files = {
        "errors.txt": text.encode(errors="backslashreplace"),
        LEFT_OUT_FILE: account.render().encode(errors="backslashreplace"),
    }
    sheet = draw_samples(inspections[0], cfg, args.num_samples)
    if sheet is not None:
        files["samples.jpg"] = Image.from_rgb(sheet, alt="").content
    for name, content in files.items():
        write_atomically(args.output / name, content)
    report = format_report(inspections, errors, warnings, account, cfg, recipe)
    print(escape_controls(report))
    share = cfg.DATASETS.VAL_FRACTION
    unvalidated = [f"'{one.source.path}'" for one in find_unvalidated(flags, opened)]
    if len(unvalidated) == len(args.data) and args.data and share:
        print(f"There is no validation set: training holds out {share:.0%}, unless you set --val.")
    elif unvalidated and share:
        print(f"Training holds out {share:.0%} of {join_first(unvalidated)}.")
    print(f"\nfiles: {args.output.resolve()}: {', '.join(files)}")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Measures what a detector forgets and learns when classes are added to it.

Takes a folder with ``annotations/instances_train.json``, ``annotations/instances_val.json`` (COCO)
and ``images/``. Old images have labels of the old classes only, and new images of the new classes
only. ``--protocol halves`` divides the training images into two halves by a seed, so each class has
half of its labels. ``--protocol objects`` takes all images with an object of the old classes as old
images, and all with an object of the new classes as new images, as in "Incremental Learning of
Object Detectors without Catastrophic Forgetting" (arXiv:1708.06977). Each cell is a training of
``custom/cached_retinanet_lite0_probe.yaml``, in a folder of its own:
  old     old images, from ImageNet weights: the detector to which classes are added
  plain   new images, from the weights of ``old``, without --keep-classes
  joined  ``old`` and ``plain``, joined by qbheat join; the time is that of ``plain``
  kept    new images, from the weights of ``old``, with --keep-classes
  both    old and new images, from the weights of ``old``, with --keep-classes
  merged  old and new images, from ImageNet weights
  half    half of the training images with all labels, from ImageNet weights
  joint   all training images with all labels, from ImageNet weights
Each is judged on all validation images with all labels. A finished cell is not trained again.

python -m benchmarks.growing --data FOLDER --case cells --seeds 1 2 3 --output output/growing
python -m benchmarks.growing --data FOLDER --case cells --held-out SOLVER.EPOCHS 10
"""

import argparse
import contextlib
import io
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from qbheat_det import load
from qbheat_det.checkpoint import join_detectors
from qbheat_det.core.errors import UserError, exit_on_user_error
from qbheat_det.core.files import write_atomically

RECIPE = "custom/cached_retinanet_lite0_probe.yaml"
_TRAIN_NET = Path(__file__).resolve().parents[1] / "tools" / "train_net.py"
_HELD_OUT = 4  # every fourth training image is held out to choose settings
_THRESHOLD = 0.01  # lowest score of boxes that are judged
Content = dict[str, Any]
"""COCO's lists."""


@dataclass(frozen=True)
class Case:
    """Names of the classes that a detector has, and of those that are added."""

    old: tuple[str, ...]
    new: tuple[str, ...]


CASES = {
    "cells": Case(old=("RBC", "Platelets"), new=("WBC",)),
    "aquarium": Case(
        old=("fish", "jellyfish", "penguin", "puffin"), new=("shark", "starfish", "stingray")
    ),
}


@dataclass(frozen=True)
class Cell:
    """A training, or detectors that are joined.

    Attributes:
        data: names of the data.
        starts_from: the cell whose weights the training starts from.
        keeps_classes: whether it keeps the classes of that cell.
        joins: the cells whose detectors are joined instead. The last one is that of the new images.
    """

    data: tuple[str, ...]
    starts_from: str = ""
    keeps_classes: bool = False
    joins: tuple[str, ...] = ()


CELLS = {
    "old": Cell(("old",)),
    "plain": Cell(("new",), starts_from="old"),
    "joined": Cell(("new",), joins=("old", "plain")),
    "kept": Cell(("new",), starts_from="old", keeps_classes=True),
    "both": Cell(("new", "old"), starts_from="old", keeps_classes=True),
    "merged": Cell(("new", "old")),
    "half": Cell(("half",)),
    "joint": Cell(("joint",)),
}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Trains the missing cells, and writes ``CASE.json`` with the results of all cells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--protocol", choices=("halves", "objects"), default="halves")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--output", type=Path, default=Path("output/growing"))
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="judge on held-out training images, to choose settings",
    )
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="overrides of the recipe")
    args = parser.parse_intermixed_args(argv)
    case = CASES[args.case]
    name = args.case if args.protocol == "halves" else f"{args.case}_{args.protocol}"
    folder = args.output / (f"{name}_held_out" if args.held_out else name)
    results = []
    for seed in args.seeds:
        data = folder / f"seed_{seed}" / "data"
        write_data(args.data, data, case, seed, args.protocol, args.held_out)
        for cell in args.cells:
            result = run_cell(cell, data, seed, args.opts)
            results.append({"case": args.case, "seed": seed, "cell": cell, **result})
            print(format_result(results[-1], case), flush=True)
    content = {
        "case": args.case,
        "protocol": args.protocol,
        "old": case.old,
        "new": case.new,
        "cells": results,
    }
    path = folder / f"{name}.json"
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    print(f"{format_summary(results, case)}\n'{path}'")


def write_data(
    source: Path, folder: Path, case: Case, seed: int, protocol: str, held_out: bool
) -> None:
    """Writes ``old.json``, ``new.json``, ``joint.json`` and ``val.json`` into a folder."""
    train = json.loads((source / "annotations" / "instances_train.json").read_text())
    val = json.loads((source / "annotations" / "instances_val.json").read_text())
    names = {category["name"] for category in train["categories"]}
    if names != {*case.old, *case.new}:
        raise UserError(f"'{source}' has the classes {sorted(names)}: name another --case")
    if held_out:
        ids = sorted(image["id"] for image in train["images"])
        val = select(train, ids[::_HELD_OUT], names)
        train = select(train, set(ids) - set(ids[::_HELD_OUT]), names)
    ids = sorted(image["id"] for image in train["images"])
    random.Random(seed).shuffle(ids)
    half = len(ids) // 2
    if protocol == "halves":
        old = select(train, ids[:half], case.old)
        new = select(train, ids[half:], case.new)
    else:
        old = select_with_objects(train, ids, case.old)
        new = select_with_objects(train, ids, case.new)
    parts = {
        "old": old,
        "new": new,
        "half": select(train, ids[:half], names),
        "joint": train,
        "val": val,
    }
    folder.mkdir(parents=True, exist_ok=True)
    images = folder / "images"
    if not images.is_symlink():
        images.symlink_to((source / "images").absolute())
    for name, content in parts.items():
        write_atomically(folder / f"{name}.json", json.dumps(content).encode())


def select_with_objects(
    content: Content, image_ids: Sequence[int], names: Sequence[str]
) -> Content:
    """Returns the labels of some classes, and only the images that have such labels."""
    boxes = select(content, image_ids, names)["annotations"]
    return select(content, {box["image_id"] for box in boxes}, names)


def select(content: Content, image_ids: Collection[int], names: Collection[str]) -> Content:
    """Returns the labels of some classes in some images."""
    categories = [entry for entry in content["categories"] if entry["name"] in names]
    category_ids = {entry["id"] for entry in categories}
    kept_ids = set(image_ids)
    return {
        "images": [image for image in content["images"] if image["id"] in kept_ids],
        "annotations": [
            box
            for box in content["annotations"]
            if box["image_id"] in kept_ids and box["category_id"] in category_ids
        ],
        "categories": categories,
    }


def run_cell(name: str, data: Path, seed: int, opts: Sequence[str]) -> Content:
    """Trains and judges a cell, unless its folder has a result."""
    folder = data.parent / name
    file = folder / "result.json"
    if file.is_file():
        return dict(json.loads(file.read_text()))
    if CELLS[name].joins:
        result = join_cells(CELLS[name].joins, folder, data)
        write_atomically(file, (json.dumps(result, indent=1) + "\n").encode())
        return result
    command = list_words(name, data, seed, opts)
    fill = folder.with_name(f"{name}_fill")
    for unfinished in (folder, fill):
        shutil.rmtree(unfinished, ignore_errors=True)
    # Fills the cache of features, which cells share, so that the time is that of training.
    train([*command, "--output", str(fill), "SOLVER.EPOCHS", "0.01", "SOLVER.MIN_ITER", "1"])
    seconds = train([*command, "--output", str(folder)])
    result = {
        "ap50": judge(folder, data / "val.json", data / "images"),
        "cpu_minutes": seconds / 60,
        "step_seconds": find_step_seconds(folder),
        "command": " ".join(command),
    }
    write_atomically(file, (json.dumps(result, indent=1) + "\n").encode())
    return result


def join_cells(cells: Sequence[str], folder: Path, data: Path) -> Content:
    """Joins the detectors of finished cells, and judges the result."""
    weights = [str(data.parent / cell / "model_final.safetensors") for cell in cells]
    folder.mkdir(exist_ok=True)
    join_detectors(weights, folder / "model_final.safetensors", overwrite=True)
    last = json.loads((data.parent / cells[-1] / "result.json").read_text())
    return {
        "ap50": judge(folder, data / "val.json", data / "images"),
        "cpu_minutes": last["cpu_minutes"],
        "step_seconds": last["step_seconds"],
        "command": "qbheat join " + " ".join(f"--weights {cell}" for cell in cells),
    }


def list_words(name: str, data: Path, seed: int, opts: Sequence[str]) -> list[str]:
    """Returns the flags and overrides of a cell."""
    cell = CELLS[name]
    words = ["--config-file", RECIPE, "SEED", str(seed), *opts]
    words += ["DATASETS.VAL_FRACTION", "0", "DATALOADER.NUM_WORKERS", "0"]
    words += ["MODEL.CACHE_FEATURES.FOLDER", str(data.parents[1] / "features")]
    for part in cell.data:
        words += ["--data", str(data / f"{part}.json")]
    if cell.starts_from:
        words += ["--weights", str(data.parent / cell.starts_from / "model_final.safetensors")]
    if cell.keeps_classes:
        words.append("--keep-classes")
    return words


def train(words: Sequence[str]) -> float:
    """Runs ``qbheat train`` in a process of its own; returns its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, str(_TRAIN_NET), *words], check=False)
    if done.returncode:
        raise UserError(f"the training ended with exit code {done.returncode}: {' '.join(words)}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def find_step_seconds(folder: Path) -> float:
    """Returns the median of the seconds per step that ``metrics.json`` lists."""
    lines = map(json.loads, (folder / "metrics.json").read_text().splitlines())
    return statistics.median(line["time"] for line in lines if "time" in line)


def judge(run: Path, val: Path, images: Path) -> dict[str, float]:
    """Returns AP50 by class, in percent. A class that the detector lacks has 0."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(val))
    ids = {entry["name"]: entry["id"] for entry in truth.dataset["categories"]}
    detector = load(run / "model_final.safetensors")
    entries = list(truth.imgs.values())
    paths = [images / entry["file_name"] for entry in entries]
    boxes = []
    predictions = detector.predict(paths, threshold=_THRESHOLD)
    for entry, found in zip(entries, predictions, strict=True):
        for (x0, y0, x1, y1), score, label in zip(
            found.boxes.tolist(), found.scores.tolist(), found.labels, strict=True
        ):
            boxes.append(
                {
                    "image_id": entry["id"],
                    "category_id": ids[label],
                    "bbox": [x0, y0, x1 - x0, y1 - y0],
                    "score": score,
                }
            )
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(truth, truth.loadRes(boxes), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    # Axes: IoU thresholds (the first is 0.5), recall, classes, areas, numbers of detections.
    precision = evaluation.eval["precision"][0, :, :, 0, -1]
    ap50 = {}
    for index, category_id in enumerate(evaluation.params.catIds):
        name = truth.cats[category_id]["name"]
        ap50[name] = 100 * float(precision[:, index].clip(0).mean())
    return ap50


def mean_of(result: Content, names: Sequence[str]) -> float:
    """Returns the mean AP50 of some classes."""
    return statistics.fmean(result["ap50"][name] for name in names)


def format_result(result: Content, case: Case) -> str:
    """Returns a line with the figures of a cell."""
    return (
        f"{result['case']}, seed {result['seed']}, {result['cell']:<7} AP50 of old classes "
        f"{mean_of(result, case.old):5.1f}, of new classes {mean_of(result, case.new):5.1f}; "
        f"{result['cpu_minutes']:.2f} CPU minutes, {1000 * result['step_seconds']:.0f} ms a step"
    )


def format_summary(results: Sequence[Content], case: Case) -> str:
    """Returns a table of the means and ranges over seeds."""
    lines = [f"{'':<8}{'old classes':>22}{'new classes':>22}{'CPU minutes':>22}"]
    for name in CELLS:
        cells = [result for result in results if result["cell"] == name]
        if not cells:
            continue
        columns = [
            [mean_of(cell, case.old) for cell in cells],
            [mean_of(cell, case.new) for cell in cells],
            [cell["cpu_minutes"] for cell in cells],
        ]
        line = f"{name:<8}"
        for values in columns:
            span = f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})"
            line += f"{span:>22}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()

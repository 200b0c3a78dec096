# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Flags that several tools share: Detectron2's flags for training, and flags for data.

Does not import torch, Detectron2 or the package, so that ``--help`` is fast.
"""

from __future__ import annotations  # ``doctor.py`` imports this in a Python that is too old

import argparse
import difflib
import importlib.util
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

# On busy machines, waiting threads should sleep: spinning took 30 times as long. On idle cores,
# spinning is faster, up to twice as fast (docs/performance.md).
if os.getloadavg()[0] > (os.cpu_count() or 1):
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_FOREIGN = (
    "torch|torchvision|torchgen|detectron2|fvcore|iopath|timm|pycocotools|faster_coco_eval|onnx.*|"
    "openvino|matplotlib|PIL|numpy|scipy|sklearn|yaml|tensorboard|pkg_resources|huggingface_hub"
)


def hide_foreign_warnings() -> None:
    """Hides warnings of libraries, unless ``python -W`` or ``PYTHONWARNINGS`` is used."""
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module=rf"({_FOREIGN})(\.|$)")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


FLAGS_OF_OTHERS = {
    "conf": "--threshold",
    "source": "--images",
    "imgsz": "--image-size",
    "model": "--weights",
    "project": "--output",
    "name": "--output",
    "epoch": "--epochs",
    "batch-size": "--batch",
    "fast": "--freeze",  # of qbheat train, which has no faster form of the whole model
}
"""Our flags by the flags of other libraries."""

# Names in the model zoo have none of these suffixes, but can have a dot, as in "1.0G".
_WEIGHTS_SUFFIXES = (".safetensors", ".pth", ".pt", ".pkl", ".pickle", ".bin", ".onnx", ".pt2")
_SECTIONS = "DATALOADER|DATASETS|GLOBAL|INPUT|MODEL|SOLVER|TEST"
_KEYS_WITHOUT_DOT = "SEED|OUTPUT_DIR|CUDNN_BENCHMARK|FLOAT32_PRECISION|VIS_PERIOD|VERSION"
# Not any word in capitals, which may be a file such as PHOTO.JPG.
_KEY = re.compile(rf"({_KEYS_WITHOUT_DOT}|({_SECTIONS})(\.[A-Z0-9_]+)+)(=.*)?", flags=re.DOTALL)


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated flags, whose errors help users of other libraries.

    If the command has a flag of another library, the error names our flag.

    ``command`` is the beginning of usage lines, such as "qbheat train". ``tools/qbheat`` sets it.
    If a tool runs without ``qbheat``, it is None, and usage lines begin with the name of the file.
    """

    command: str | None = None

    def __init__(self, **options: Any) -> None:
        options.setdefault("prog", self.command)
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=layout, allow_abbrev=False, **options)

    def add_overrides(self, about: str = "overrides of the config, such as SEED 2") -> None:
        """Adds the argument ``opts``: pairs of a config key and a value, between any two flags."""
        self.add_argument("opts", nargs="*", default=[], metavar="KEY VALUE", help=about)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parses the words of a command, by default those of ``sys.argv``.

        A flag that takes several values ends at a config key, such as ``--images`` in
        ``--images photos SEED 2``. A file in the current folder is never a key.
        """
        words = list(sys.argv[1:] if args is None else args)
        if not any(action.dest == "opts" for action in self._actions):
            return super().parse_args(words, namespace)
        words, pairs = self._split_overrides(words)
        parsed = self.parse_intermixed_args(words, namespace)
        for word in parsed.opts:
            if "=" in word:
                self.error(
                    f"'{word}': flags are --NAME VALUE, such as --epochs 3; overrides KEY VALUE"
                )
        parsed.opts = [*pairs, *parsed.opts]
        return parsed

    def _split_overrides(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Returns the other words, and the config keys with the value after each of them."""
        others: list[str] = []
        pairs: list[str] = []
        position = 0
        while position < len(words):
            word = words[position]
            if word == "--":  # all words after it are values
                break
            if not _KEY.fullmatch(word) or os.path.exists(word):
                number = 1 + self._count_values(word)
                others += words[position : position + number]
                position += number
                continue
            if "=" in word:
                self.error(f"'{word}': write KEY VALUE, without '='")
            value = words[position + 1 : position + 2]
            if not value or value[0].startswith("--"):
                self.error(f"the config key {word} has no value")
            pairs += [word, *value]
            position += 2
        return others + words[position:], pairs

    def _count_values(self, word: str) -> int:
        """Returns how many of the next words belong to a flag; 0 if this depends on the words."""
        action = self._option_string_actions.get(word)
        if action is None:
            return 0
        if action.nargs is None:
            return 1
        return action.nargs if isinstance(action.nargs, int) else 0

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and exits with code 2."""
        for word in sys.argv[1:]:
            name = word.split("=")[0]
            ours = FLAGS_OF_OTHERS.get(name.lstrip("-"), name)
            known = self._option_string_actions
            # Other libraries write KEY=VALUE. A word without "=" may be the name of a file.
            is_flag = word.startswith("--") or "=" in word
            if is_flag and name not in known and ours in known:
                message += f"; use {ours} for {name}"
        super().error(message)


def make_parser(doc: str | None) -> Parser:
    """Returns a parser whose help shows a tool's docstring.

    The first paragraph is printed above the flags, and the rest below them.
    """
    summary, rest = (doc or "").split("\n\n", 1)
    return Parser(description=summary, epilog=rest)


def check_inputs(
    *paths: str | os.PathLike[str] | None,
    weights: Iterable[str | None] = (),
    config_file: str | None = None,
) -> None:
    """Exits with an error if an input does not exist. Call this function before slow imports.

    Addresses and None are ignored.

    Args:
        paths: files and folders.
        weights: files, folders, or names in the model zoo.
        config_file: a file, or the name of a shipped config.
    """
    errors = [_find_path_error(str(path)) for path in paths if path]
    errors += [_find_weights_error(name) for name in weights if name]
    if config_file:
        errors.append(_find_config_error(config_file))
    for error in filter(None, errors):
        if os.environ.get("RANK", "0") != "0":
            time.sleep(1)  # the first process reports, before torchrun ends all of them
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _is_there(path: str) -> bool:
    """Returns whether a file or folder exists. An address counts as existing."""
    return "://" in path or os.path.exists(path)


def _find_path_error(path: str) -> str | None:
    """Returns an error message if there is no file or folder of this name."""
    if _is_there(path):
        return None
    return f"there is no file or folder '{path}'"


def _find_weights_error(name: str) -> str | None:
    """Returns an error message if weights are neither a file, a folder nor a name in the zoo."""
    if _is_there(name):
        return None
    if name.lower().endswith(_WEIGHTS_SUFFIXES):
        return f"there is no file '{name}'"
    index = _find_package() / "model_zoo" / "index.json"
    known = [entry["name"] for entry in json.loads(index.read_text("utf-8"))]
    if name in known:
        return None
    similar = difflib.get_close_matches(name, known, n=2)
    if name.startswith("timm/"):
        similar.insert(0, f"timm://{name.removeprefix('timm/')}")
    hint = "see qbheat zoo list"
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    return f"'{name}' is neither a file nor a name in the model zoo: {hint}"


def _find_config_error(name: str) -> str | None:
    """Returns an error message if a config is neither a file nor shipped with the package."""
    if os.path.isfile(name):
        return None
    package = _find_package()
    # The folder is inside the package in a wheel, and next to it in a checkout.
    shipped = set()
    for root in (package / "configs", package.parent / "configs"):
        shipped.update(str(path.relative_to(root)) for path in root.rglob("*.yaml"))
    name = name.removeprefix("configs/")
    if name in shipped:
        return None
    similar = difflib.get_close_matches(name, sorted(shipped), n=3, cutoff=0.3)
    return f"there is no config '{name}'; did you mean {', '.join(similar)}?"


def _find_package() -> Path:
    """Returns the folder of the package, which is not imported."""
    spec = importlib.util.find_spec("qbheat_det")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


WEIGHTS = "a file (.safetensors, .pth, .pkl), a run's folder, or a name in the zoo"
SOURCES = (
    "COCO, YOLO, Pascal VOC, CSV, or the export of an annotation tool, as a folder, label file or "
    "zip; or class folders (docs/train.md lists all formats)"
)


def add_training_flags(parser: Parser) -> None:
    """Adds the flags of Detectron2's ``default_argument_parser``, and flags for config keys."""
    parser.add_argument(
        "--config-file",
        default="",
        metavar="CFG",
        help="path of a config, or name of a shipped config such as "
        "custom/retinanet_285M_probe.yaml (default: the config inside --weights, or else a recipe "
        "for the kind of --data)",
    )
    parser.add_argument(
        "--size",
        choices=["s", "m", "l"],
        default="",
        help="a detector's recipe for a GPU: EfficientNet-Lite0 (default on a GPU), ResNet-50 or "
        "ConvNeXt-Tiny",
    )
    parser.add_argument("--weights", default="", metavar="W", help=f"MODEL.WEIGHTS: {WEIGHTS}")
    parser.add_argument("--output", default="", metavar="DIR", help="OUTPUT_DIR")
    parser.add_argument(
        "--epochs",
        type=float,
        metavar="N",
        help="SOLVER.EPOCHS, passes over the training images; if a recipe has two stages, those of "
        "the second one alone (--minutes shortens both)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="choose epochs and image size for a run of this duration",
    )
    parser.add_argument(
        "--batch", type=int, metavar="N", help="SOLVER.IMS_PER_BATCH, images per optimizer step"
    )
    parser.add_argument(
        "--image-size",
        type=int,
        metavar="PIXELS",
        help="largest shorter side of a detector's images, or side of square images otherwise",
    )
    parser.add_argument(
        "--tile",
        type=int,
        metavar="PX",
        help="side of overlapping tiles, on "
        "which a detector is also trained and evaluated (default: as in --weights; "
        "0: no tiles)",
    )
    parser.add_argument(
        "--freeze",
        action="store_true",
        help="freeze the whole backbone, and train the head on cached features: the fastest way to "
        "a detector, minutes on a CPU",
    )
    parser.add_argument("--device", default="", help="MODEL.DEVICE: cpu or cuda")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --output, or start a new one if there is none",
    )
    parser.add_argument(
        "--eval-only",
        action="store_true",
        help="evaluate --weights (with --resume, the last checkpoint in --output), do not train; "
        "result files are written to --output if it is given",
    )
    add_process_flags(parser)
    parser.add_overrides("overrides of the config, such as SOLVER.IMS_PER_BATCH 4")


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of Detectron2 for several GPUs and machines."""
    parser.add_argument("--num-gpus", type=int, default=1, help="number of GPUs *per machine*")
    parser.add_argument("--num-machines", type=int, default=1, help="total number of machines")
    parser.add_argument(
        "--machine-rank", type=int, default=0, help="the rank of this machine (unique per machine)"
    )
    port = 2**15 + 2**14 + os.getuid() % 2**14
    parser.add_argument(
        "--dist-url",
        default=f"tcp://127.0.0.1:{port}",
        help="initialization URL for PyTorch's distributed backend",
    )


def add_fault_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags that say how many faults in the data are allowed."""
    faults = group.add_mutually_exclusive_group()
    faults.add_argument(
        "--max-left-out",
        type=float,
        metavar="SHARE",
        help="DATASETS.MAX_LEFT_OUT: images and boxes with faults are left out and listed; more "
        "than this share of them is an error (default: 0.1)",
    )
    faults.add_argument(
        "--strict",
        dest="max_left_out",
        action="store_const",
        const=0.0,
        help="make each fault in the data an error (--max-left-out 0)",
    )


def add_data_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds and returns the group of flags that name data."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        metavar="SRC",
        action="append",
        default=[],
        help=f"{SOURCES}; repeatable for detectors: an image has only the classes of its data set "
        "annotated",
    )
    group.add_argument(
        "--images",
        metavar="DIR",
        action="append",
        default=[],
        help="folder with the images of a COCO json (default: next to the json), once for each of "
        "several --data; without --data, folder of unlabelled images for pre-training, with its "
        "subfolders; repeatable",
    )
    group.add_argument(
        "--val",
        metavar="SRC",
        action="append",
        default=[],
        help="validation data, in the formats of --data (default: the validation part of --data, "
        "or else a held-out fifth of its images); repeatable for detectors",
    )
    group.add_argument(
        "--class-map",
        default="",
        metavar="FILE",
        help="YAML file with lines 'name in the data: name in the detector', for synonyms",
    )
    add_fault_flags(group)
    group.add_argument(
        "--val-images",
        metavar="DIR",
        action="append",
        default=[],
        help="the same as --images, for --val; or validation images for pre-training",
    )
    return group


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that chooses between this machine and a Ray cluster."""
    parser.add_argument(
        "--engine",
        choices=["local", "ray"],
        default="local",
        help="ray: run on the cluster of $RAY_ADDRESS, or on all cores and GPUs of this machine, "
        "and write Parquet files to the folder of --output (needs the extra ray)",
    )


def print_ray_report(report: Any, args: argparse.Namespace) -> int:
    """Prints the counts of a ``RayReport``, and returns the exit code."""
    from qbheat_det.core.text import escape_controls

    print(f"{args.output}: {report.num_images:,} images")
    for file, reason in report.unreadable.items():
        print(escape_controls(f"could not be read: {file}: {reason}"), file=sys.stderr)
    if report.num_unreadable > len(report.unreadable):
        print(f"could not be read: {report.num_unreadable:,} in all", file=sys.stderr)
    return int(report.num_unreadable > 0)

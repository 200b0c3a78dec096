# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Feeds damaged files to every reader of foreign files: ``python -m tests.fuzz`` (``make fuzz``).

Each case damages one file of a valid input at random, and reads it. A reader may accept the file,
or raise a ``UserError`` that names a file. Every other exception is a fault, and so are a case that
takes more than 5 seconds, and memory that grows by more than 1 GiB. The input of a fault is kept.
"""

import argparse
import copy
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from qbheat_det.checkpoint import load_run_config, read_weights
from qbheat_det.checkpoint.weights_file import WeightsInfo, info_of, save_weights
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.data import find_image_errors, open_source, read_annotations
from qbheat_det.data.images import name_unreadable, read_image
from qbheat_det.inference.exported import METADATA_KEY, ExportedModel, ExportInfo
from qbheat_det.inference.images import read_rgb

from .data.format_cases import MAKERS

MAX_SECONDS = 5
MAX_GROWTH = 2**30  # bytes
CONFIG = """\
_BASE_: base.yaml
MODEL:
  BACKBONE: {NAME: MobileFormer}
  PIXEL_MEAN: [123.6, 116.2, 103.5]
  CLASS_NAMES: [cell, "null"]
SOLVER: {BASE_LR: 0.01, STEP_EPOCHS: (8, 11), MAX_ITER: 3}
INPUT: {MIN_SIZE_TRAIN: (64, 80)}
SEED: 1
"""
DEEP = 100_000  # levels of nested values
TEXTS = (
    *("", "0", "-1", "1e400", "-1e400", "nan", "Infinity", "9" * 5000, "0." + "3" * 400, "null"),
    *("x" * 300, "a/" * 3000, "../../../../etc/passwd", "/etc/passwd", "a\nb", "\0", "\x1b[31m"),
    *("data:image/png;base64,iVBOR", "http://[::1", "http://a:b/c", "%", "%ff%00", "file://", "//"),
    *("2026-13-45", "2026-01-01", "1:2:3", "&a [*a]", "*b", "<<", "!!python/name:os.system", "? "),
    *("{", "}", "[", "]", '"', "'", ",", ":", "<", ">", "</", "&amp;", "&x;", "\ud800", "\u2028"),
    *("[" * DEEP, '{"a":' * DEEP, "<a>" * DEEP, "- " * DEEP, "é", "\ufeff", "0x10", "1_000", "~"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 0.0, -0.5, 10**5000, 10**400, 1e308, float("inf"), float("nan"), 2**63),
    *("", [], {}, [[]], [None], [{}], {"": None}, [0, 0], [1, 2, 3, 4, 5], ["a", {}], {"a": []}),
    *("x" * 300, "a\nb", "\0", "data:image/png;base64,iVBOR", "http://[::1", "../../etc/passwd"),
)


class Reader(NamedTuple):
    """A reader of foreign files.

    Attributes:
        write: writes a valid input into an empty folder, and returns its path.
        read: reads the input at this path.
        suffixes: suffixes of the files to damage; () for all.
    """

    write: Callable[[Path], object]
    read: Callable[[Path], object]
    suffixes: tuple[str, ...] = ()


def read_data(path: Path) -> None:
    source = open_source(str(path))
    for part in (source.train, source.val):
        if part is not None and part.has_boxes:
            read_annotations(part).check()
    if source.account is not None:
        source.account.check()


def write_config(folder: Path) -> Path:
    (folder / "base.yaml").write_text("VERSION: 2\n")
    (folder / "config.yaml").write_text(CONFIG)
    return folder / "config.yaml"


def write_weights(folder: Path) -> Path:
    info = WeightsInfo(config=CONFIG.replace("_BASE_: base.yaml\n", ""), class_names=("cell", "b"))
    save_weights(str(folder / "w.safetensors"), {"stem.weight": torch.zeros(2, 3)}, info)
    return folder / "w.safetensors"


def write_checkpoint(folder: Path) -> Path:
    info = WeightsInfo(config=CONFIG.replace("_BASE_: base.yaml\n", ""), class_names=("cell", "b"))
    torch.save({"model": {"w": torch.zeros(2)}, "info": info.to_dict()}, folder / "w.pth")
    return folder / "w.pth"


def read_checkpoint(path: Path) -> None:
    info_of(str(path))
    read_weights(str(path))
    load_run_config(str(path), device="cpu")


def write_onnx(folder: Path) -> Path:
    import onnx
    from onnx import TensorProto, helper

    images = helper.make_tensor_value_info("images", TensorProto.UINT8, ["n", "h", "w", 3])
    features = helper.make_tensor_value_info("s16", TensorProto.UINT8, ["n", "h", "w", 3])
    node = helper.make_node("Identity", ["images"], ["s16"])
    graph = helper.make_graph([node], "g", [images], [features])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    config = CONFIG.replace("_BASE_: base.yaml\n", "")
    info = ExportInfo("features", ("s16",), "RGB", ("cell", "b"), (1, 2), config=config)
    helper.set_model_props(model, {METADATA_KEY: info.to_json()})
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def read_onnx(path: Path) -> None:
    ExportedModel.open(path, device="cpu").load_config()


def make_image_writer(suffix: str, **options: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        noise = random.Random(0).randbytes(40 * 30 * 3)
        image = Image.frombytes("RGB", (40, 30), noise)
        image.save(folder / f"a{suffix}", **options)
        return folder / f"a{suffix}"

    return write


def read_picture(path: Path) -> None:
    errors = find_image_errors([{"file_name": str(path), "width": 40, "height": 30}])
    try:
        read_image(str(path), "BGR")
        is_read = True
    except Exception as error:  # the mappers leave the image out
        name_unreadable(str(path), error)
        is_read = False
    # Only the ends of a JPEG are checked before training.
    if not errors and not is_read and path.suffix != ".jpg":
        raise AssertionError("training cannot read an image that has passed the check")
    read_rgb(path)


IMAGES = {
    "jpeg": make_image_writer(".jpg"),
    "progressive_jpeg": make_image_writer(".jpg", progressive=True),
    "png": make_image_writer(".png"),
    "webp": make_image_writer(".webp"),
    "tiff": make_image_writer(".tif", compression="tiff_lzw"),
    "gif": make_image_writer(".gif"),
    "bmp": make_image_writer(".bmp"),
}
LABELS = (".json", ".xml", ".csv", ".txt", ".yaml", ".data", ".names", ".zip", ".jsonl")
READERS = {
    **{make.__name__.removeprefix("write_"): Reader(make, read_data, LABELS) for make in MAKERS},
    "config": Reader(write_config, load_config),
    "safetensors": Reader(write_weights, read_checkpoint),
    "pth": Reader(write_checkpoint, read_checkpoint),
    "onnx": Reader(write_onnx, read_onnx),
    **{name: Reader(write, read_picture) for name, write in IMAGES.items()},
}


def damage(content: bytes, rng: random.Random, suffix: str) -> bytes:
    """Returns a file's content with one to three damages."""
    for _ in range(rng.randint(1, 3)):
        if suffix in (".json", ".jsonl") and rng.random() < 0.7:
            content = _damage_json(content, rng)
        elif rng.random() < 0.7:
            content = _damage_text(content, rng)
        else:
            content = _damage_bytes(content, rng)
    return content


def _damage_json(content: bytes, rng: random.Random) -> bytes:
    """Replaces or removes a value at any depth."""
    try:
        root = [json.loads(content)]
    except (ValueError, RecursionError):
        return content
    places: list[tuple[Any, Any]] = []  # (list or dict, index or key)
    pending: list[Any] = [root]
    while pending:
        node = pending.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], dict | list):
                pending.append(node[key])
    node, key = rng.choice(places)
    if rng.random() < 0.2 and node is not root:
        del node[key]
    else:
        node[key] = copy.deepcopy(rng.choice(VALUES))
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(root[0]).encode()
    finally:
        sys.set_int_max_str_digits(limit)


def _damage_text(content: bytes, rng: random.Random) -> bytes:
    """Replaces a word or number by an evil one, or inserts it."""
    words = list(re.finditer(rb"[\w.+-]+", content))
    evil = rng.choice(TEXTS).encode("utf-8", "surrogatepass")
    if not words:
        return content + evil
    word = rng.choice(words)
    end = word.start() if rng.random() < 0.2 else word.end()
    return content[: word.start()] + evil + content[end:]


def _damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flips a bit, cuts the end, or removes, repeats or randomizes a piece."""
    if not content:
        return rng.randbytes(9)
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.choice((1, 2, 4, 30, 300)))
    piece = content[start:end]
    kind = rng.choice(("flip", "cut", "remove", "repeat", "randomize"))
    if kind == "flip":
        piece = bytes([piece[0] ^ (1 << rng.randrange(8))]) + piece[1:]
    elif kind == "cut":
        return content[:start]
    elif kind == "remove":
        piece = b""
    elif kind == "repeat":
        piece *= rng.choice((2, 3, 100))
    else:
        piece = rng.randbytes(len(piece))
    return content[:start] + piece + content[end:]


class _TooSlowError(BaseException):
    """A case takes too long; no ``except Exception`` of a reader hides it."""


def _stop(number: int, frame: object) -> None:
    raise _TooSlowError


def run_case(reader: Reader, folder: Path, seed: str) -> tuple[str, str]:
    """Runs a case in a new folder. Returns "ok", "refused" or "fault", and the message."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    written = reader.write(folder)
    path = written if isinstance(written, Path) else folder
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    chosen = [file for file in files if file.suffix in reader.suffixes] or files
    file = rng.choice(chosen)
    file.write_bytes(damage(file.read_bytes(), rng, file.suffix))
    previous = signal.signal(signal.SIGALRM, _stop)
    signal.alarm(MAX_SECONDS + 1)
    start = time.monotonic()
    result = ("ok", "")
    try:
        reader.read(path)
    except UserError as error:
        result = ("refused", str(error))
        if not str(error).strip():
            result = ("fault", "the message is empty")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        result = ("fault", traceback.format_exc())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    seconds = time.monotonic() - start
    if seconds > MAX_SECONDS:
        result = ("fault", f"it took {seconds:.1f} s: {result[1]}")
    return result


def fuzz(
    names: list[str], num_cases: int, seconds: float, seed: object, folder: Path
) -> Iterator[tuple[str, str, str]]:
    """Yields (reader and seed, result, message) of each case, in turn for the readers."""
    end = time.monotonic() + seconds
    before = _peak_memory()
    for number in range(num_cases):
        if time.monotonic() > end:
            return
        name = names[number % len(names)]
        case = f"{name}-{seed}-{number}"
        result, message = run_case(READERS[name], folder / case, case)
        growth = _peak_memory() - before
        if growth > MAX_GROWTH:
            result, message = "fault", f"memory grew by {growth / 2**30:.1f} GiB: {message}"
            before += growth
        if result != "fault":
            shutil.rmtree(folder / case)
        yield case, result, message


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # bytes on Linux


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="number of cases")
    parser.add_argument("--seconds", type=float, default=600, help="end after this time")
    parser.add_argument("--seed", type=int, default=0, help="other cases for another number")
    parser.add_argument("--only", nargs="+", choices=READERS, default=list(READERS))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="qbheat_fuzz_"))
    os.environ["QBHEAT_CACHE"] = str(folder / "cache")
    counts: Counter[str] = Counter()
    for case, result, message in fuzz(args.only, args.cases, args.seconds, args.seed, folder):
        counts[result] += 1
        if result == "fault":
            print(f"{case}: kept in '{folder / case}'\n{message[-1500:]}\n", flush=True)
    print(", ".join(f"{count:,} {result}" for result, count in sorted(counts.items())))
    if not counts["fault"]:
        shutil.rmtree(folder)
    return int(counts["fault"] > 0)


if __name__ == "__main__":
    sys.exit(main())

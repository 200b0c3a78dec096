# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Weights of several heads on one backbone as an encoder and heads in files of their own."""

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.engine import DefaultPredictor
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.engine.media import Image
from qbheat_det.engine.predict import build_predictor

from .agreement import Agreement, build_reference, measure_agreement, table_of
from .deployable import build_deployable
from .export import TOLERANCE, ExportReport, example_images, on_cpu, quiet_exporters, read_images
from .export_info import METADATA_KEY, SPLIT_KEY, ExportInfo
from .formats import Translations, capture, write_onnx_program
from .split import SIZES, SplitHead, SplitParts, split_models
from .split_model import ENCODER, HEAD_PREFIX, SplitModel
from .suppression import suppress_in_onnx


def name_heads(weights: Sequence[str]) -> dict[str, str]:
    """Returns files of weights by the names of their heads.

    Args:
        weights: NAME=FILE, or FILE, which is called as it is, or as its folder if every run has a
            file of that name.

    Raises:
        UserError: two have one name, or a name is not fit for a file.
    """
    named: dict[str, str] = {}
    for word in weights:
        name, is_named, file = word.partition("=")
        if not is_named:
            file, path = word, Path(word)
            is_common = re.fullmatch(r"model_(final|best|\d+)", path.stem)
            name = path.parent.name if is_common else path.stem
        if not re.fullmatch(r"[\w.-]+", name):
            raise UserError(f"'{name}' is no name for a head: give one, as --weights NAME={file}")
        if name in named:
            raise UserError(f"two heads are called '{name}': name them, as --weights NAME={file}")
        named[name] = file
    return named


@dataclass
class _Given:
    """A head's model in PyTorch."""

    cfg: CfgNode
    predictor: DefaultPredictor


def export_split(
    configs: Mapping[str, CfgNode],
    folder: Path,
    *,
    images: Sequence[str] = (),
    tolerance: float | None = None,
    overwrite: bool = False,
) -> dict[str, ExportReport]:
    """Writes ``encoder.onnx`` and ``head_NAME.onnx`` of each head, and compares all with PyTorch.

    Args:
        configs: of each head's weights, by its name; see ``load_run_config``.
        folder: of the files.
        images: see ``export_model``; the test set of the first head's config if none.
        tolerance: see ``export_model``.
        overwrite: whether the folder may hold a split export; its files go, and no others.

    Returns:
        What came of each head, by its name.

    Raises:
        UserError: the folder holds other files of these names, the backbones or the pre-processing
            differ, a model cannot be exported, or a head does not agree with PyTorch. Nothing is
            written or removed then.
    """
    _check_folder(folder, overwrite)
    given = {name: _Given(cfg := on_cpu(c), build_predictor(cfg)) for name, c in configs.items()}
    operator, translations = suppress_in_onnx()
    parts = split_models(
        {
            name: build_deployable(one.predictor.model, one.cfg, suppress=operator)
            for name, one in given.items()
        }
    )
    first = next(iter(given.values())).cfg
    pictures, source = read_images(first, images)
    if parts.multiple_of:
        pictures = _without_padding(pictures, first, parts.multiple_of)
        source = f"{len(pictures)} of {source}, whose sizes need no padding"
    with tempfile.TemporaryDirectory() as temporary:
        written = Path(temporary)
        write_split(parts, written, translations)
        model = SplitModel.open(written, device="cpu")
        reports = {
            name: _compare(model, name, one, pictures, source, tolerance, folder)
            for name, one in given.items()
        }
        install_split(written, folder)
    return reports


def write_split(parts: SplitParts, folder: Path, translations: Translations) -> None:
    """Writes the parts as ONNX.

    Args:
        parts: of models that were built with ``suppress_in_onnx``.
        folder: of the files.
        translations: see ``write_onnx_program``.

    Raises:
        UserError: a package is missing, or a file cannot be written.
    """
    split = json.dumps({"encoder": parts.identity, "multiple_of": parts.multiple_of})

    def describe(info: ExportInfo) -> dict[str, str]:
        return {METADATA_KEY: info.to_json(), SPLIT_KEY: split}

    example = example_images()
    with torch.no_grad(), quiet_exporters():
        *maps, sizes = parts.encoder(example)
        write_onnx_program(
            capture(parts.encoder, example),
            folder / ENCODER,
            describe(parts.encoder_info),
            ["images"],
            parts.encoder_info.outputs,
            translations=translations,
        )
        by_name = dict(zip(parts.encoder.names, maps, strict=True))
        for name, head in parts.heads.items():
            write_onnx_program(
                capture_head(head, [by_name[read] for read in head.names], sizes),
                folder / f"{HEAD_PREFIX}{name}.onnx",
                describe(parts.infos[name]),
                [*head.names, SIZES],
                parts.infos[name].outputs,
                translations=translations,
            )


def capture_head(
    head: SplitHead, maps: list[Tensor], sizes: Tensor
) -> torch.export.ExportedProgram:
    """Returns a head as a program, batch and sizes of the maps left open.

    Args:
        head: in evaluation mode.
        maps: an example of what it reads.
        sizes: that go with it.
    """
    # How maps of two strides depend on each other, the head itself says.
    free = torch.export.Dim.AUTO
    shapes = [{0: free, 2: free, 3: free} if one.ndim == 4 else {0: free} for one in maps]
    with torch.no_grad():
        return torch.export.export(head, (maps, sizes), dynamic_shapes=(shapes, None), strict=False)


def _compare(
    model: SplitModel,
    name: str,
    given: _Given,
    pictures: Sequence[Image],
    source: str,
    tolerance: float | None,
    folder: Path,
) -> ExportReport:
    task = model.infos[name].task
    allowed = TOLERANCE[task] if tolerance is None else tolerance
    rows: list[Agreement] = measure_agreement(
        model.head(name),
        build_reference(given.predictor, given.cfg, task),
        pictures,
        tolerance=allowed,
    )
    if not all(row.holds(allowed) for row in rows):
        raise UserError(
            f"'{folder}' is not written: what the head '{name}' gives on {source} is not what "
            f"PyTorch gives to {allowed:g} (--tolerance)\n{table_of(rows, task, allowed)}"
        )
    return ExportReport(folder / f"{HEAD_PREFIX}{name}.onnx", rows, task, allowed, source)


def _find_parts(folder: Path) -> list[Path]:
    """Returns files that are called as those of a split export, the encoder first."""
    encoder = folder / ENCODER
    return [encoder] * encoder.exists() + sorted(folder.glob(f"{HEAD_PREFIX}*.onnx"))


def _check_folder(folder: Path, overwrite: bool) -> None:
    old = _find_parts(folder)
    if folder.is_file() or (old and not overwrite):
        what = "is a file" if folder.is_file() else f"holds {old[0].name}"
        raise UserError(f"--output '{folder}' {what}: name another folder, or say --overwrite")
    for path in old:
        if not _is_part(path):
            raise UserError(
                f"--output '{folder}' holds {path.name}, which is no whole part of a split export "
                "and stays: move it away, or name another folder"
            )


def _is_part(path: Path) -> bool:
    try:
        import onnx
    except ImportError as error:
        raise UserError(
            "--split needs onnx, which is not installed: pip install 'qbheat_det[export]'"
        ) from error
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception:  # a broken file can raise anything
        return False
    return any(entry.key == SPLIT_KEY for entry in model.metadata_props)


def install_split(written: Path, folder: Path) -> None:
    """Puts a split in the place of another: all of it is on the folder's disk before any file goes.

    Args:
        written: folder with all files of the split, and no others.
        folder: where they are to be; heads of an earlier split that are no more go.

    Raises:
        UserError: a file cannot be written.
    """
    new: dict[Path, Path] = {}
    try:
        for path in sorted(written.iterdir()):
            target = folder / path.name
            new[target] = folder / f".{path.name}.new"
            _copy(path, new[target])
        stale = [path for path in _find_parts(folder) if path not in new]
        for target, path in new.items():
            os.replace(path, target)
        for path in stale:
            path.unlink()
    except OSError as error:
        raise UserError(f"cannot write '{folder}': {error.strerror or error}") from error
    finally:
        for path in new.values():
            path.unlink(missing_ok=True)


def _copy(source: Path, target: Path) -> None:
    content = source.read_bytes()
    write_atomically(target, lambda stream: stream.write(content))


def _without_padding(pictures: Sequence[Image], cfg: CfgNode, multiple_of: int) -> list[Image]:
    """Returns images of one size, which the resize brings to multiples of a number.

    Raises:
        UserError: there is none.
    """
    resize = ResizeShortestEdge([cfg.INPUT.MIN_SIZE_TEST] * 2, cfg.INPUT.MAX_SIZE_TEST)

    def fits(image: Image) -> bool:
        transform = resize.get_transform(image)
        height, width = transform.apply_image(image).shape[:2]
        return height % multiple_of == 0 and width % multiple_of == 0

    fitting = [np.ascontiguousarray(image) for image in pictures if fits(image)]
    if not fitting:
        raise UserError(
            f"the heads pad images differently, and share a pass only where height and width after "
            f"the resize are multiples of {multiple_of}: none of the images is so; name others "
            "with --images, or export each head on its own"
        )
    ((size, _),) = Counter(image.shape for image in fitting).most_common(1)
    return [image for image in fitting if image.shape == size]

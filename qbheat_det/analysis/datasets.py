# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Checks of datasets: errors and warnings, statistics, and samples of augmented images."""

import filecmp
import itertools
import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json
from detectron2.data.detection_utils import convert_image_to_rgb
from detectron2.structures import BoxMode
from numpy.typing import NDArray
from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import preserved_randomness, seed_place
from qbheat_det.core.text import join_first
from qbheat_det.data import (
    Account,
    Annotations,
    Source,
    build_mapper,
    check_same_classes,
    join_accounts,
    read_annotations,
)
from qbheat_det.data.checks import DataError, find_record_errors
from qbheat_det.data.datasets.account import LeftOut
from qbheat_det.engine import RunFlags, read_config
from qbheat_det.engine.run_data import OpenedSource, Role, leave_out_images
from qbheat_det.evaluation import choose_max_detections
from qbheat_det.inference.drawing import RGBImage, draw_instances
from qbheat_det.tasks import find_task_of_data

from .plotting import add_heading, tile_images

_TINY_SIDE = 8  # in pixels at the network's input: the stride of the finest level of most heads
_CLASSES_SHOWN, _ERRORS_SHOWN = 40, 10  # number of classes, and of errors of each kind
_COCO_SIZES = (32.0, 96.0)  # square root of the area that separates small, medium and large boxes


@dataclass(frozen=True)
class DatasetSource:
    """A dataset to inspect, for training or for evaluation."""

    name: str
    role: Role
    source: Source | None = None  # None if ``name`` is registered
    annotations: Annotations | None = field(default=None, repr=False)  # content of ``source``


@dataclass(frozen=True)
class Inspection:
    """Result of the checks of one dataset."""

    source: DatasetSource
    records: list[dict[str, Any]]  # Detectron2's dicts, without invalid images and annotations
    class_names: Sequence[str]
    errors: list[DataError]  # without what the account leaves out
    annotations: Annotations | None = None  # None if they cannot be used

    @cached_property
    def boxes_per_class(self) -> dict[str, int]:
        """The number of boxes, without crowds, by class name."""
        counts = Counter(a["category_id"] for record in self.records for a in list_objects(record))
        return {name: counts[k] for k, name in enumerate(self.class_names)}


def list_objects(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the annotations of a record, without crowds."""
    return [one for one in record.get("annotations", ()) if not one.get("iscrowd", 0)]


def load_recipe(flags: RunFlags, sources: Mapping[Role, OpenedSource]) -> tuple[CfgNode, str]:
    """Returns the config of a training with these flags and opened sources, and its name.

    For data sets that only ``opts`` name, training has no default, and Detectron2's is returned.
    Raises a ``UserError`` if the config is invalid.
    """
    if not (flags.config_file or flags.data or flags.images):
        return load_config(None, [str(word) for word in flags.opts]), "Detectron2's defaults"
    cfg = read_config(flags, sources)
    name = flags.config_file or flags.overrides.get("MODEL.WEIGHTS", "")
    return cfg, name or find_task_of_data(sources["train"].source).recipe


def list_sources(cfg: CfgNode, sources: Mapping[Role, OpenedSource]) -> list[DatasetSource]:
    """Returns the opened datasets, or else those of the config. Training datasets come first.

    Raises a ``UserError`` if data have no boxes, or there is no dataset.
    """
    listed = []
    for role, opened in sources.items():
        if opened.annotations is None:
            raise UserError(f"'{opened.source.path}' has no boxes, but boxes are needed here")
        listed.append(DatasetSource(role, role, opened.source, opened.annotations))
    if not listed:
        listed = [DatasetSource(name, "train") for name in cfg.DATASETS.TRAIN]
        listed += [DatasetSource(name, "val") for name in cfg.DATASETS.TEST]
    if not listed:
        raise UserError("the config names no dataset: use --data")
    return listed


def inspect_dataset(source: DatasetSource, cfg: CfgNode) -> Inspection:
    """Checks the annotations, the records and every image file of a dataset.

    ``MODEL.MASK_ON``, ``INPUT.MASK_FORMAT`` and ``DATALOADER.FILTER_EMPTY_ANNOTATIONS`` determine
    which annotations are required, and ``INPUT.MAX_SIZE_TRAIN`` and ``MAX_SIZE_TEST`` which images
    are too elongated. Raises a ``UserError`` if the dataset, its annotation file or its image
    folder does not exist.
    """
    named = source.source or _locate(source)
    try:
        content = source.annotations or read_annotations(named)
        leave_out_images(content, cfg)
    except UserError as error:
        unusable = DataError("annotations that cannot be used", named.path, str(error))
        return Inspection(source, [], (), [unusable])
    records = _load_valid(content)
    errors = find_record_errors(
        source.name,
        records,
        num_classes=len(content.class_names),
        filter_empty=source.role == "train" and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
        mask_format=cfg.INPUT.MASK_FORMAT if cfg.MODEL.MASK_ON else None,
        longest=min(cfg.INPUT.MAX_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TEST),
    )
    if content.problem:
        errors.append(DataError("no labels", named.path, content.problem))
    if content.account.faults:  # these explain why no valid record is left
        errors = [error for error in errors if error.kind not in ("empty dataset", "no boxes")]
    return Inspection(source, records, content.class_names, errors, content)


def account_for(inspections: Sequence[Inspection]) -> Account:
    """Returns the account of all inspected datasets."""
    return join_accounts(one.annotations.account for one in inspections if one.annotations)


def compare_datasets(inspections: Sequence[Inspection]) -> tuple[list[DataError], list[str]]:
    """Compares training and evaluation datasets. Returns errors and warnings.

    It is an error if the datasets have different classes, or if a training and an evaluation
    dataset share a byte-identical image (under any file name). Using the same dataset for both is
    only a warning.
    """
    errors: list[DataError] = []
    warnings: list[str] = []
    roles = [[one for one in inspections if one.source.role == role] for role in ("train", "val")]
    for train, val in itertools.product(*roles):
        names = f"'{train.source.name}' and '{val.source.name}'"
        # Images are compared too, because one data.yaml or VOC folder may describe both datasets.
        files = [{record["file_name"] for record in one.records} for one in (train, val)]
        same = train.source.name == val.source.name or files[0] == files[1]
        if train.annotations and val.annotations:
            try:
                check_same_classes(train.annotations, val.annotations)
            except UserError as error:
                errors.append(DataError("classes that differ", names, str(error)))
        warnings += _compare_class_counts(train, val) + _compare_class_counts(val, train)
        if same:
            warnings.append(f"{names} are the same data, so AP does not measure generalization")
        else:
            errors += _find_leaks(train, val)
    return errors, warnings


def _locate(source: DatasetSource) -> Source:
    """Returns the annotation file and image folder of a registered dataset."""
    if source.name not in DatasetCatalog:
        raise UserError(f"there is no dataset '{source.name}': name files, or register it")
    metadata = MetadataCatalog.get(source.name)
    paths = {key: metadata.get(key) for key in ("json_file", "image_root")}
    for path, exists in zip(paths.values(), (os.path.isfile, os.path.isdir), strict=True):
        if not path or not exists(path):
            raise UserError(
                f"'{path}' of the {source.role} data does not exist: set $DETECTRON2_DATASETS"
            )
    return Source("coco", str(paths["json_file"]), image_root=str(paths["image_root"]))


def _load_valid(content: Annotations) -> list[dict[str, Any]]:
    """Loads the valid entries of an annotation file with Detectron2's loader."""
    name = f"qbheat_det inspection of {content.origin}"
    if not (content.images and content.categories):
        return []
    with tempfile.TemporaryDirectory() as folder:
        valid = Path(folder) / "valid.json"
        valid.write_text(json.dumps(content.keep()), encoding="utf-8")
        records = list(load_coco_json(str(valid), content.image_root, name))
    MetadataCatalog.remove(name)
    return records


def _compare_class_counts(one: Inspection, other: Inspection) -> list[str]:
    """Warns of classes that have boxes in ``one``, but none in ``other``."""
    missing = [name for name, number in one.boxes_per_class.items()
               if number and other.boxes_per_class.get(name) == 0]  # fmt: skip
    text = f"'{one.source.name}' has boxes of {join_first(map(repr, missing))}"
    return [f"{text}, '{other.source.name}' has none"] if missing else []


def _find_leaks(train: Inspection, val: Inspection) -> list[DataError]:
    """Returns errors for byte-identical images. Only compares files of the same size."""
    files: dict[int, list[str]] = defaultdict(list)
    for record in train.records:
        if os.path.isfile(record["file_name"]):
            files[os.path.getsize(record["file_name"])].append(record["file_name"])
    errors = []
    for record in val.records:
        path = record["file_name"]
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        for other in files.get(size, ()) if size else ():
            if filecmp.cmp(path, other, shallow=False):  # stops at the first difference
                where = f"image {path!r} (image id {record['image_id']}) of '{val.source.name}'"
                reason = f"'{train.source.name}' trains on the same image, as {other!r}"
                errors.append(DataError("image in training and evaluation", where, reason))
                break
    return errors


def format_report(
    inspections: Sequence[Inspection],
    errors: Sequence[DataError],
    warnings: Sequence[str],
    account: Account,
    cfg: CfgNode,
    recipe: str,
) -> str:
    """Formats statistics, the account, boxes per class, warnings and errors of all datasets.

    ``recipe`` is the name of ``cfg``.
    """
    columns = {one.source.name: measure(one, cfg) for one in inspections}
    names = list(next(iter(columns.values())))
    rows = [(name, *(own[name] for own in columns.values())) for name in names]
    counts = [one.boxes_per_class for one in inspections]
    total: Counter[str] = Counter()
    for own in counts:
        total.update(own)
    order = total.most_common(_CLASSES_SHOWN)
    classes = [(name, *(own.get(name, 0) for own in counts)) for name, _ in order]
    separator = "\n    "
    by_kind: dict[str, list[DataError]] = defaultdict(list)
    for error in errors:
        what = f"{error.item} " if isinstance(error, LeftOut) else ""
        by_kind[f"{what}{error.kind}"].append(error)
    lines = [f"warning: {text}" for text in [*warnings, *account.notes]]
    lines.append(f"{len(errors):,} error{'s'[: len(errors) > 1]}" if errors else "No errors.")
    for kind, found in by_kind.items():
        lines.append(f"  {kind}: {len(found):,}")
        messages = (error.message for error in found)
        lines.append(f"    {join_first(messages, _ERRORS_SHOWN, separator)}")
    return "\n\n".join(
        [
            tabulate(rows, ("median (5 % to 95 %)", *columns), "plain", disable_numparse=True),
            f"Used: {account.summarize()}",
            f"Input of evaluation: {_describe_input(cfg)}, as in {recipe}.",
            tabulate(classes, ("class", *columns), tablefmt="plain", intfmt=","),
            "\n".join(lines),
        ]
    )


def _describe_input(cfg: CfgNode) -> str:
    """Describes the size of whole images at the input of evaluation."""
    shortest, longest = cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    if not shortest:
        return "images of their own size"
    return f"images with a shorter side of {shortest} px and a longer side of at most {longest} px"


def measure(inspection: Inspection, cfg: CfgNode) -> dict[str, str]:
    """Returns statistics of a dataset as text, by title. Crowds are not counted as boxes."""
    records = inspection.records
    rows = [(*BoxMode.convert(list(one["bbox"]), one["bbox_mode"], BoxMode.XYWH_ABS), index)
            for index, record in enumerate(records) for one in list_objects(record)]  # fmt: skip
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    image_of = table[:, 4].astype(np.int64)
    sizes = np.array([(r["width"], r["height"]) for r in records], np.float64).reshape(-1, 2)
    sides = np.sqrt(table[:, 2] * table[:, 3])
    relative = sides / np.sqrt(sizes.prod(axis=1))[image_of]
    numbers = np.bincount(np.digitize(sides, _COCO_SIZES), minlength=3)
    per_image = np.bincount(image_of, minlength=len(records))
    shortest, longest = cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    scales = np.minimum(shortest / sizes.min(axis=1), longest / sizes.max(axis=1))
    if not shortest:  # no resize
        scales = np.ones(len(records))
    tiny = table[:, 2:4].min(axis=1) * scales[image_of] < _TINY_SIDE
    shares = [f"{100 * n / len(sides):.1f} %" if len(sides) else "n/a"
              for n in (*numbers, tiny.sum())]  # fmt: skip
    crowds = sum(len(r.get("annotations", ())) - len(list_objects(r)) for r in records)
    return {
        "images": f"{len(records):,}",
        "images without boxes": f"{(per_image == 0).sum():,}",
        "boxes": f"{len(sides):,}",
        "crowd regions": f"{crowds:,}",
        "boxes in an image": _quantiles(per_image, "{:.0f}"),
        "most boxes in an image / detections kept": _compare_with_limit(per_image),
        "box size (px)": _quantiles(sides, "{:.0f}"),
        "box size (share of image)": _quantiles(100 * relative, "{:.1f} %"),
        "small / medium / large": " / ".join(shares[:3]),
        f"below {_TINY_SIDE} px at the input of evaluation": shares[3],
    }


def draw_samples(inspection: Inspection, cfg: CfgNode, number: int) -> RGBImage | None:
    """Draws random images, augmented by the config's training mapper, on an RGB sheet (H, W, 3).

    Skips images without boxes and unreadable images. Returns None if no image is left. The headings
    state the sizes of the image files after their EXIF rotation.
    """
    seed = max(cfg.SEED, 0)
    records = [record for record in inspection.records if list_objects(record)]
    mapper = build_mapper(cfg, is_train=True) if number and records else None
    cells: list[RGBImage] = []
    for position, index in enumerate(np.random.default_rng(seed).permutation(len(records))):
        if mapper is None or len(cells) == number:
            break
        try:
            with preserved_randomness():
                seed_place(seed, position)
                mapped = mapper(records[index])
        except UserError:
            continue
        if isinstance(mapped, dict):
            pixels = mapped["image"].permute(1, 2, 0).numpy()
            pixels = np.ascontiguousarray(convert_image_to_rgb(pixels, cfg.INPUT.FORMAT))
            drawn = draw_instances(pixels, mapped["instances"], inspection.class_names)
            cells.append(add_heading(drawn, _name_sample(records[index])))
    return tile_images(cells, columns=4) if cells else None


def _name_sample(record: Mapping[str, Any]) -> str:
    """Returns the name and size of a record's image file. The mapper has checked the size."""
    return f"{Path(record['file_name']).name}: {record['width']} x {record['height']}"


def _compare_with_limit(per_image: NDArray[np.int64]) -> str:
    """Returns the largest number of boxes, and the number of detections that runs keep for it."""
    most = int(per_image.max(initial=0))
    kept = choose_max_detections(most)
    return f"{most:,} / {kept:,}" + " (the limit)" * (kept < most)


def _quantiles(values: NDArray[np.number], form: str) -> str:
    if not len(values):
        return "none"
    low, middle, high = (form.format(value) for value in np.quantile(values, (0.05, 0.5, 0.95)))
    return f"{middle} ({low} to {high})"

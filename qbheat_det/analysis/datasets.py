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
    count_annotated,
    describe_annotated,
    join_accounts,
    read_annotations,
)
from qbheat_det.data.checks import DataError, find_record_errors
from qbheat_det.data.datasets.account import LeftOut
from qbheat_det.engine import RunFlags, read_config
from qbheat_det.engine.opened_sources import (
    Role,
    Sources,
    find_images_of_both_parts,
    join_roles,
)
from qbheat_det.engine.run_config import choose_recipe
from qbheat_det.engine.usable_images import get_longest_side, leave_out_images
from qbheat_det.evaluation import choose_max_detections
from qbheat_det.inference.drawing import RGBImage, draw_instances

from .plotting import add_heading, tile_images

_TINY_SIDE = 8  # in pixels at the network's input: the stride of the finest level of most heads
_MAX_CLASSES = 40  # in the table of boxes per class
_MAX_ERRORS = 10  # in the report, for each kind of error
_COCO_SIZES = (32.0, 96.0)  # pixels; square roots of the areas between small, medium and large


@dataclass(frozen=True)
class DatasetSource:
    """A dataset to inspect, for training ("train") or for evaluation ("val").

    It is either opened from files, or registered in Detectron2's catalog. If several datasets are
    joined, ``accounts`` are theirs, and ``in_both`` has the paths of training images that are
    validation images too, which training uses for validation only.
    """

    name: str
    role: Role
    source: Source | None = None  # None if ``name`` is registered
    annotations: Annotations | None = field(default=None, repr=False)  # content of ``source``
    accounts: Sequence[Account] = ()
    in_both: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Inspection:
    """Result of the checks of one dataset."""

    source: DatasetSource
    records: list[dict[str, Any]]  # Detectron2's dicts, without invalid images and annotations
    class_names: Sequence[str]
    errors: list[DataError]  # without the items that the account lists as left out
    annotations: Annotations | None = None  # None if they cannot be used

    @cached_property
    def boxes_per_class(self) -> dict[str, int]:
        """The number of boxes, without crowds, by class name."""
        counts: Counter[int] = Counter()
        for record in self.records:
            counts.update(annotation["category_id"] for annotation in list_objects(record))
        return {name: counts[index] for index, name in enumerate(self.class_names)}


def list_objects(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the annotations of a record in Detectron2's format, without crowds."""
    return [
        annotation
        for annotation in record.get("annotations", ())
        if not annotation.get("iscrowd", 0)
    ]


def load_recipe(flags: RunFlags) -> tuple[CfgNode, str]:
    """Returns the config that ``qbheat train`` uses for these flags, and its name.

    Without a config file and data, training has no default config, so the result is Detectron2's
    default config with ``opts``, which may name registered datasets. Raises a ``UserError`` if the
    config is invalid.
    """
    if not (flags.config_file or flags.data or flags.images):
        return load_config(None, [str(word) for word in flags.opts]), "Detectron2's defaults"
    name = flags.config_file or flags.overrides.get("MODEL.WEIGHTS", "")
    return read_config(flags), name or choose_recipe(flags)


def list_sources(cfg: CfgNode, flags: RunFlags, sources: Sources) -> list[DatasetSource]:
    """Returns the opened datasets, or the registered ones of the config if none is opened.

    Training datasets come first. Several of them are joined, as in training. Raises a
    ``UserError`` if opened data have no boxes, or if there is no dataset.
    """
    members = list(itertools.chain.from_iterable(sources.values()))
    for opened in members:
        if opened.annotations is None:
            raise UserError(
                f"'{opened.source.path}' has no boxes: name a dataset with boxes by --data"
            )
    if flags.class_map or any(len(opened) > 1 for opened in sources.values()):
        for opened in members:
            if opened.annotations is not None:
                _leave_out(opened.annotations, cfg)
        in_both = frozenset().union(*find_images_of_both_parts(flags, sources).values())
        joined = join_roles(flags, sources)
        return [
            DatasetSource(
                role, role, one.source, one.annotations, list(one.accounts.values()), in_both
            )
            for role, one in joined.items()
        ]
    listed = [
        DatasetSource(role, role, opened.source, opened.annotations)
        for role, (opened,) in sources.items()
    ]
    if not listed:
        listed = [DatasetSource(name, "train") for name in cfg.DATASETS.TRAIN]
        listed += [DatasetSource(name, "val") for name in cfg.DATASETS.TEST]
    if not listed:
        raise UserError("the config names no dataset: use --data")
    return listed


def inspect_dataset(source: DatasetSource, cfg: CfgNode) -> Inspection:
    """Checks the annotations, the records and every image file of a dataset.

    The config determines which annotations are required (``MODEL.MASK_ON``, ``INPUT.MASK_FORMAT``
    and ``DATALOADER.FILTER_EMPTY_ANNOTATIONS``), and which images are too elongated
    (``INPUT.MAX_SIZE_TRAIN`` and ``MAX_SIZE_TEST``). Raises a ``UserError`` if the dataset, its
    annotation file or its image folder does not exist.
    """
    files = source.source or _find_files(source)
    try:
        annotations = source.annotations or read_annotations(files)
        if not source.accounts:
            _leave_out(annotations, cfg)
    except UserError as error:
        unusable = DataError("annotations that cannot be used", files.path, str(error))
        return Inspection(source, [], (), [unusable])
    records = _load_valid(annotations)
    errors = find_record_errors(
        source.name,
        records,
        num_classes=len(annotations.class_names),
        filter_empty=source.role == "train" and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
        mask_format=cfg.INPUT.MASK_FORMAT if cfg.MODEL.MASK_ON else None,
        longest=min(cfg.INPUT.MAX_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TEST),
    )
    if annotations.problem:
        errors.append(DataError("no labels", files.path, annotations.problem))
    if annotations.account.faults:
        # The account already explains why no valid image or box is left.
        errors = [error for error in errors if error.kind not in ("empty dataset", "no boxes")]
    return Inspection(source, records, annotations.class_names, errors, annotations)


def _leave_out(annotations: Annotations, cfg: CfgNode) -> None:
    """Leaves out images that training cannot use."""
    leave_out_images(annotations, get_longest_side(cfg), check_files=cfg.DATASETS.CHECK_IMAGES)


def account_for(inspections: Sequence[Inspection]) -> Account:
    """Returns the account of all inspected datasets."""
    accounts: list[Account] = []
    for inspection in inspections:
        accounts += inspection.source.accounts
        if inspection.annotations and not inspection.source.accounts:
            accounts.append(inspection.annotations.account)
    return join_accounts(accounts)


def compare_datasets(inspections: Sequence[Inspection]) -> tuple[list[DataError], list[str]]:
    """Compares training and evaluation datasets. Returns errors and warnings.

    It is an error if the datasets have different classes, or if a training and an evaluation
    dataset share a byte-identical image (under any file name). Using the same dataset for both is
    only a warning.
    """
    errors: list[DataError] = []
    warnings: list[str] = []
    training = [inspection for inspection in inspections if inspection.source.role == "train"]
    evaluation = [inspection for inspection in inspections if inspection.source.role == "val"]
    for train, val in itertools.product(training, evaluation):
        names = f"'{train.source.name}' and '{val.source.name}'"
        if train.annotations and val.annotations:
            try:
                check_same_classes(train.annotations, val.annotations)
            except UserError as error:
                errors.append(DataError("classes that differ", names, str(error)))
        warnings += _warn_of_missing_classes(train, val)
        warnings += _warn_of_missing_classes(val, train)
        # Images are compared too, because one data.yaml or VOC folder may describe both datasets.
        train_files = {record["file_name"] for record in train.records}
        val_files = {record["file_name"] for record in val.records}
        if train.source.name == val.source.name or train_files == val_files:
            warnings.append(f"{names} are the same data, so AP does not measure generalization")
        else:
            errors += _find_leaks(train, val)
    return errors, warnings


def _find_files(source: DatasetSource) -> Source:
    """Returns the annotation file and image folder of a registered dataset."""
    if source.name not in DatasetCatalog:
        raise UserError(f"there is no dataset '{source.name}': name files, or register it")
    metadata = MetadataCatalog.get(source.name)
    json_file = metadata.get("json_file")
    image_root = metadata.get("image_root")
    for path, exists in ((json_file, os.path.isfile), (image_root, os.path.isdir)):
        if not path or not exists(path):
            raise UserError(
                f"'{path}' of the {source.role} data does not exist: set $DETECTRON2_DATASETS"
            )
    return Source("coco", str(json_file), image_root=str(image_root))


def _load_valid(annotations: Annotations) -> list[dict[str, Any]]:
    """Returns Detectron2's records of the valid images and annotations."""
    if not annotations.images or not annotations.categories:
        return []
    name = f"qbheat_det inspection of {annotations.origin}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "valid.json"
        path.write_text(json.dumps(annotations.keep()), encoding="utf-8")
        records = list(load_coco_json(str(path), annotations.image_root, name))
    MetadataCatalog.remove(name)
    return records


def _warn_of_missing_classes(inspection: Inspection, other: Inspection) -> list[str]:
    """Returns a warning if classes have boxes in the first dataset, but none in the other.

    The result is a list with this warning, or an empty list.
    """
    missing = []
    for name, count in inspection.boxes_per_class.items():
        other_count = other.boxes_per_class.get(name)  # None if the class is unknown there
        if count > 0 and other_count == 0:
            missing.append(repr(name))
    if not missing:
        return []
    return [
        f"'{inspection.source.name}' has boxes of {join_first(missing)}, "
        f"'{other.source.name}' has none"
    ]


def _find_leaks(train: Inspection, val: Inspection) -> list[DataError]:
    """Returns an error for each image of ``val`` that is byte-identical to one of ``train``."""
    # Files of different sizes cannot be identical.
    train_files: dict[int, list[str]] = defaultdict(list)  # by size in bytes
    for record in train.records:
        path = record["file_name"]
        if os.path.isfile(path) and path not in train.source.in_both:
            train_files[os.path.getsize(path)].append(path)
    errors = []
    for record in val.records:
        path = record["file_name"]
        if not os.path.isfile(path) or not os.path.getsize(path):
            continue
        for other in train_files.get(os.path.getsize(path), ()):
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
    """Returns the text of the report on all datasets.

    It has statistics, the account, boxes per class, warnings and errors. ``recipe`` is the name of
    ``cfg``.
    """
    columns = {inspection.source.name: measure(inspection, cfg) for inspection in inspections}
    titles = list(next(iter(columns.values())))  # the same for all datasets
    statistics = []
    for title in titles:
        values = [column[title] for column in columns.values()]
        statistics.append((title, *values))

    boxes_per_class = [inspection.boxes_per_class for inspection in inspections]
    total: Counter[str] = Counter()
    for counts in boxes_per_class:
        total.update(counts)
    class_rows = []
    for name, _ in total.most_common(_MAX_CLASSES):
        class_rows.append((name, *(counts.get(name, 0) for counts in boxes_per_class)))

    messages = _list_annotated(inspections)
    messages += _advise_empty_images(inspections)
    messages += [f"warning: {text}" for text in [*warnings, *account.notes]]
    messages += _list_errors(errors)
    return "\n\n".join(
        [
            tabulate(
                statistics, ("median (5 % to 95 %)", *columns), "plain", disable_numparse=True
            ),
            f"Used: {account.summarize()}",
            f"Input of evaluation: {_describe_input(cfg)}, as in {recipe}.",
            tabulate(class_rows, ("class", *columns), tablefmt="plain", intfmt=","),
            "\n".join(messages),
        ]
    )


def _list_annotated(inspections: Sequence[Inspection]) -> list[str]:
    """Returns a line for each dataset in which not all classes are annotated in all images."""
    lines = []
    for inspection in inspections:
        if inspection.annotations is None:
            continue
        num_annotated = count_annotated(inspection.annotations.keep())
        if num_annotated:
            num_images = len(inspection.annotations.images)
            text = describe_annotated(num_annotated, num_images)
            lines.append(f"{inspection.source.name}: {text}")
    return lines


def _advise_empty_images(inspections: Sequence[Inspection]) -> list[str]:
    """Returns a line for each training dataset in which every image has objects."""
    lines = []
    for inspection in inspections:
        is_full = all(record["annotations"] for record in inspection.records)
        if inspection.source.role == "train" and inspection.records and is_full:
            lines.append(
                f"advice: every image of '{inspection.source.name}' has objects: add some images "
                "without, or the detector may find its objects in other pictures"
            )
    return lines


def _list_errors(errors: Sequence[DataError]) -> list[str]:
    """Returns lines with the number of errors, and the first ten errors of each kind."""
    if not errors:
        return ["No errors."]
    by_kind: dict[str, list[DataError]] = defaultdict(list)
    for error in errors:
        kind = error.kind
        if isinstance(error, LeftOut):
            kind = f"{error.item} {kind}"
        by_kind[kind].append(error)
    lines = [f"{len(errors):,} errors" if len(errors) > 1 else "1 error"]
    for kind, errors_of_kind in by_kind.items():
        messages = [error.message for error in errors_of_kind]
        text = join_first(messages, _MAX_ERRORS, separator="\n    ")
        lines.append(f"  {kind}: {len(messages):,}")
        lines.append(f"    {text}")
    return lines


def _describe_input(cfg: CfgNode) -> str:
    """Describes the size to which evaluation resizes whole images."""
    min_size = cfg.INPUT.MIN_SIZE_TEST
    max_size = cfg.INPUT.MAX_SIZE_TEST
    if not min_size:
        return "images of their own size"
    return f"images with a shorter side of {min_size} px and a longer side of at most {max_size} px"


def measure(inspection: Inspection, cfg: CfgNode) -> dict[str, str]:
    """Returns statistics of a dataset as text, by title. Crowds are not counted as boxes."""
    # N images and B boxes.
    records = inspection.records
    boxes = []  # XYWH in pixels
    indices = []  # the index of the image of each box
    num_crowds = 0
    for index, record in enumerate(records):
        annotations = list_objects(record)
        num_crowds += len(record.get("annotations", ())) - len(annotations)
        for annotation in annotations:
            box = list(annotation["bbox"])
            boxes.append(BoxMode.convert(box, annotation["bbox_mode"], BoxMode.XYWH_ABS))
            indices.append(index)
    box_sizes = np.array(boxes, dtype=np.float64).reshape(-1, 4)[:, 2:]  # (B, 2), W x H
    image_of = np.array(indices, dtype=np.int64)  # (B,)
    image_sizes = np.array([(record["width"], record["height"]) for record in records], np.float64)
    image_sizes = image_sizes.reshape(-1, 2)  # (N, 2), W x H; also without images

    sides = np.sqrt(box_sizes[:, 0] * box_sizes[:, 1])  # (B,), square roots of the areas
    image_sides = np.sqrt(image_sizes.prod(axis=1))  # (N,)
    relative_sides = sides / image_sides[image_of]
    boxes_per_image = np.bincount(image_of, minlength=len(records))
    size_classes = np.digitize(sides, _COCO_SIZES)  # (B,), 0 for small to 2 for large
    small, medium, large = np.bincount(size_classes, minlength=3)

    # The resize of evaluation scales the shorter side of an image to ``min_size``, unless the
    # longer side would become longer than ``max_size``. It keeps the size if ``min_size`` is 0.
    min_size = cfg.INPUT.MIN_SIZE_TEST
    max_size = cfg.INPUT.MAX_SIZE_TEST
    if min_size:
        shorter_sides = image_sizes.min(axis=1)
        longer_sides = image_sizes.max(axis=1)
        scales = np.minimum(min_size / shorter_sides, max_size / longer_sides)  # (N,)
    else:
        scales = np.ones(len(records))
    input_sides = box_sizes.min(axis=1) * scales[image_of]  # (B,), shorter sides of the boxes
    num_tiny = (input_sides < _TINY_SIDE).sum()

    def share(count: int) -> str:
        """Formats a number of boxes in percent of all boxes."""
        if not len(sides):
            return "n/a"
        return f"{100 * count / len(sides):.1f} %"

    return {
        "images": f"{len(records):,}",
        "images without boxes": f"{(boxes_per_image == 0).sum():,}",
        "boxes": f"{len(sides):,}",
        "crowd regions": f"{num_crowds:,}",
        "boxes in an image": _format_quantiles(boxes_per_image, "{:.0f}"),
        "most boxes in an image / detections kept": _compare_with_limit(boxes_per_image),
        "box size (px)": _format_quantiles(sides, "{:.0f}"),
        "box size (share of image)": _format_quantiles(100 * relative_sides, "{:.1f} %"),
        "small / medium / large": f"{share(small)} / {share(medium)} / {share(large)}",
        f"below {_TINY_SIDE} px at the input of evaluation": share(num_tiny),
    }


def draw_samples(inspection: Inspection, cfg: CfgNode, number: int) -> RGBImage | None:
    """Draws random images, augmented by the config's training mapper, on an RGB sheet (H, W, 3).

    Skips images without boxes and unreadable images. Returns None if no image is left, or if
    ``number`` is 0. The headings state the sizes of the image files after their EXIF rotation.
    """
    records = [record for record in inspection.records if list_objects(record)]
    if not records or not number:
        return None
    seed = max(cfg.SEED, 0)
    mapper = build_mapper(cfg, is_train=True)
    samples: list[RGBImage] = []
    order = np.random.default_rng(seed).permutation(len(records))
    for position, index in enumerate(order):
        record = records[index]
        try:
            with preserved_randomness():
                seed_place(seed, position)
                mapped = mapper(record)
        except UserError:
            continue
        if not isinstance(mapped, dict):  # a ``DataError``, or None for a skipped image
            continue
        pixels = mapped["image"].permute(1, 2, 0).numpy()  # (H, W, 3)
        pixels = np.ascontiguousarray(convert_image_to_rgb(pixels, cfg.INPUT.FORMAT))
        drawn = draw_instances(pixels, mapped["instances"], inspection.class_names)
        # The mapper has checked that the record states the size of the file.
        heading = f"{Path(record['file_name']).name}: {record['width']} x {record['height']}"
        samples.append(add_heading(drawn, heading))
        if len(samples) == number:
            break
    if not samples:
        return None
    return tile_images(samples, columns=4)


def _compare_with_limit(boxes_per_image: NDArray[np.int64]) -> str:
    """Returns the largest number of boxes in an image, and the number of detections to keep.

    Training chooses this number of detections per image for this dataset.
    """
    max_boxes = int(boxes_per_image.max(initial=0))
    max_detections = choose_max_detections(max_boxes)
    text = f"{max_boxes:,} / {max_detections:,}"
    if max_detections < max_boxes:
        text += " (the limit)"
    return text


def _format_quantiles(values: NDArray[np.number], form: str) -> str:
    """Returns the text "MEDIAN (LOW to HIGH)" with the quantiles 0.05 and 0.95.

    ``form`` is the format of each number, such as "{:.0f}".
    """
    if not len(values):
        return "none"
    quantiles = np.quantile(values, (0.05, 0.5, 0.95))
    low, median, high = (form.format(quantile) for quantile in quantiles)
    return f"{median} ({low} to {high})"

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Opens, checks and registers the data sets given by flags, and holds out validation images."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils import comm

from qbheat_det.checkpoint import class_names_of
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.data import (
    LEFT_OUT_FILE,
    SEEN_FILE,
    SPLIT_FILE,
    Account,
    Annotations,
    DataError,
    DataSource,
    SeenImages,
    Source,
    check_same_classes,
    fingerprint_images,
    forget_annotations,
    join_accounts,
    list_classes,
    load_classes,
    match_image_errors,
    open_images,
    open_source,
    read_annotations,
    read_split,
    register_source,
    split_source,
)
from qbheat_det.data.checks import find_elongation
from qbheat_det.evaluation import count_most_objects

from .resume import find_broken_images, name_last_checkpoint
from .run_flags import FIRST_STAGE_WEIGHTS, RunFlags, find_job

logger = logging.getLogger(__name__)

# Names of the training and validation set, by job.
_SETS = {
    "boxes": ("custom_train", "custom_val"),
    "images": ("custom_images", "custom_val_images"),
    "classes": ("custom_labelled_train", "custom_labelled_val"),
}
_UNLABELLED = "custom_unlabelled"
# Config keys that flags set.
_KEYS = {
    "data": "DATASETS.TRAIN",
    "images": "DATASETS.TRAIN",
    "val": "DATASETS.TEST",
    "val_images": "DATASETS.TEST",
    "unlabelled": "DATASETS.UNLABELLED",
}
_MOST_FINGERPRINTS = 300_000  # number of images that are remembered in ``seen_images.json``
CUSTOM_SETS = (*(name for pair in _SETS.values() for name in pair), _UNLABELLED)

Split = dict[str, Any]
"""The content of a ``split.json``."""


def use_data_flags(cfg: CfgNode, flags: RunFlags) -> None:
    """Registers the data sets given by flags, and sets their names in the config, in place.

    Raises:
        UserError: flags contradict each other or the config, or the data are invalid, or too many
            images or boxes have faults (``DATASETS.MAX_LEFT_OUT``).
    """
    # The config of an earlier run may name data sets that only its flags registered. Drop them.
    data, job = cfg.DATASETS, find_job(cfg)
    for key in ("TRAIN", "TEST", "UNLABELLED"):
        data[key] = tuple(n for n in data[key] if n not in CUSTOM_SETS or n in DatasetCatalog)
    _check_flags(flags, job)
    forget_annotations()
    try:
        _register_flags(cfg, flags, job)
    finally:
        forget_annotations()
    if flags.unlabelled:
        register_source(_UNLABELLED, open_images(flags.unlabelled).train)
        data.UNLABELLED = (_UNLABELLED,)


def _register_flags(cfg: CfgNode, flags: RunFlags, job: str) -> None:
    """Registers the training and the validation set, and sets their names in the config."""
    data = cfg.DATASETS
    sources = open_flags(flags, job)
    is_whole = set(sources) == {"train"}  # without a validation part
    names_test = "DATASETS.TEST" in flags.overrides
    if names_test:
        sources.pop("val", None)
    if flags.eval_only:
        whole = sources.get("val") or sources.get("train")
        sources = {"val": whole} if whole else {}
    if job == "images":
        sources = {role: source.without_labels() for role, source in sources.items()}
    elif job == "boxes":
        sources = _choose_classes(cfg, flags, sources)
    continues = bool(flags.resume and name_last_checkpoint(Path(cfg.OUTPUT_DIR)))
    for source in dict.fromkeys(sources.values()):
        check_source(source, cfg, continues=continues)
    seen = _read_seen(cfg) if job != "images" else SeenImages()
    split = None
    if flags.eval_only and is_whole and sources:
        sources["val"], split = _find_held_out(cfg, flags, sources["val"])
    elif is_whole and sources and job != "images" and data.VAL_FRACTION and not names_test:
        split = _split(cfg, flags, sources["train"], seen)
        file = os.path.abspath(Path(cfg.OUTPUT_DIR) / SPLIT_FILE)
        whole = sources["train"]
        sources = {part: whole.with_split(file, part) for part in ("train", "val")}
    names = dict(zip(("train", "val"), _SETS[job], strict=True))
    if "train" in sources:
        data.TRAIN = (names["train"],)
    if "val" in sources:
        data.TEST = (names["val"],)
    elif "train" in sources and not names_test:
        data.TEST = ()  # a recipe's test sets do not fit custom training images
    paths = _register(sources, names, split)
    if split and not flags.eval_only:
        MetadataCatalog.get(names["val"]).split = split
    for role in sources if job == "classes" else ():
        paths[role] = [record["file_name"] for record in DatasetCatalog.get(names[role])]
        MetadataCatalog.get(names[role]).account.check(data.MAX_LEFT_OUT)
    if job == "classes" and "train" in sources and len(only := list_classes(data.TRAIN)) < 2:
        raise UserError(f"'{flags.data}' has images of one class, '{only[0]}'")
    if job != "images" and sources and comm.is_main_process():
        _find_shared(cfg, paths, names, seen, eval_only=flags.eval_only)


def _register(
    sources: Mapping[str, Source], names: Mapping[str, str], split: Split | None
) -> dict[str, list[str]]:
    """Registers sources by role, and checks that they have equal classes.

    Returns the paths of the images of sources with boxes, by role.
    """
    found: dict[str, Annotations] = {}
    paths: dict[str, list[str]] = {}
    for role, source in sources.items():
        keep = frozenset(split[source.split_part]) if split and source.split_part else None
        annotations = register_source(names[role], source, keep=keep)
        if annotations is None:
            continue
        found[role] = annotations
        lists = annotations.keep(keep)
        root = annotations.image_root
        paths[role] = [os.path.join(root, image["file_name"]) for image in lists["images"]]
        most = count_most_objects(lists["annotations"])
        MetadataCatalog.get(names[role]).most_objects = most
    if len(found) == 2:
        check_same_classes(found["train"], found["val"])
    return paths


def _choose_classes(cfg: CfgNode, flags: RunFlags, sources: dict[str, Source]) -> dict[str, Source]:
    """Sets the classes of sources whose label files do not list them.

    In evaluation, these are the classes of the weights. In training, both sets have the classes of
    the training set, or those of the validation set if they include all of the training set.
    """
    weights = cfg.MODEL.WEIGHTS if flags.eval_only and not flags.resume else ""
    classes = tuple(class_names_of(weights)) if weights else ()
    if not classes and len(sources) == 2:
        given, wanted = (read_annotations(source).class_names for source in sources.values())
        if given == wanted:
            return sources
        classes = wanted if set(given) <= set(wanted) else given
    return {
        role: source
        if read_annotations(source).class_names == classes
        else source.with_classes(classes)
        for role, source in sources.items()
    }


def check_source(source: Source, cfg: CfgNode, *, continues: bool = False) -> None:
    """Leaves out images of a source with boxes that cannot be used.

    The main process checks the image files, if ``DATASETS.CHECK_IMAGES`` is set. A run that
    ``continues`` leaves out the same images as at its start. Images that have broken since then are
    replaced in training.

    Raises:
        UserError: more than ``DATASETS.MAX_LEFT_OUT`` of the images or boxes have faults.
    """
    if not source.has_boxes:
        return
    annotations = read_annotations(source)
    if not source.labelled:
        annotations.account.check(cfg.DATASETS.MAX_LEFT_OUT, images_only=True)
        return
    annotations.check()
    if continues:
        reason = "the run has left it out at its start"
        broken = find_broken_images(Path(cfg.OUTPUT_DIR))
        names = {os.path.relpath(path, annotations.image_root): path for path in broken}
        own = {image["file_name"] for image in annotations.images} & names.keys()
        errors = {name: DataError("unreadable image", names[name], reason) for name in own}
        annotations.leave_out(errors)
    else:
        leave_out_images(annotations, cfg)
    annotations.account.check(cfg.DATASETS.MAX_LEFT_OUT)


def leave_out_images(annotations: Annotations, cfg: CfgNode) -> None:
    """Leaves out images that are too elongated, and with ``DATASETS.CHECK_IMAGES`` broken ones."""
    if annotations.problem:  # images without labels have no sizes
        return
    longest = min(cfg.INPUT.MAX_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TEST)
    errors = _find_elongated(annotations, longest)
    if cfg.DATASETS.CHECK_IMAGES:
        errors |= _find_broken(annotations)
    annotations.leave_out(errors)


def _find_elongated(annotations: Annotations, longest: float) -> dict[str, DataError]:
    """Returns the errors of images whose shorter side would be resized to zero pixels, by name."""
    errors = {}
    for image in annotations.images:
        if reason := find_elongation((image["height"], image["width"]), longest or math.inf):
            name = image["file_name"]
            errors[name] = DataError("elongated image", f"image '{name}'", reason)
    return errors


def _find_broken(annotations: Annotations) -> dict[str, DataError]:
    """Returns the errors in the files of images, by name."""
    errors: dict[str, DataError] = {}
    if comm.is_main_process():
        names = {
            os.path.join(annotations.image_root, image["file_name"]): image["file_name"]
            for image in annotations.images
        }
        records = [
            {"file_name": path, "width": image["width"], "height": image["height"]}
            for path, image in zip(names, annotations.images, strict=True)
        ]
        errors = {names[path]: error for path, error in match_image_errors(records).items()}
    return dict(comm.all_gather(errors)[0])


def list_accounts(cfg: CfgNode) -> list[Account]:
    """Returns the accounts of the data sets that flags have given to a run, one for each path."""
    metadata = map(MetadataCatalog.get, (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))
    accounts = {one.source.path: one.account for one in metadata if one.get("source")}
    return list(accounts.values())


def write_data_files(cfg: CfgNode) -> None:
    """Writes what a run has decided about its data into ``OUTPUT_DIR``.

    These are ``split.json`` if some of the training images are held out, ``seen_images.json``, and
    ``left_out.txt`` if anything is left out.
    """
    folder = Path(cfg.OUTPUT_DIR)
    account = join_accounts(list_accounts(cfg))
    if text := account.render():
        write_atomically(folder / LEFT_OUT_FILE, text.encode(errors="backslashreplace"))
    for name in cfg.DATASETS.TEST:
        if split := MetadataCatalog.get(name).get("split"):
            path = folder / SPLIT_FILE
            write_atomically(path, (json.dumps(split, indent=1) + "\n").encode())
            logger.info(f"{len(split['val']):,} images are held out for evaluation, see '{path}'")
    for name in cfg.DATASETS.TRAIN:
        if seen := MetadataCatalog.get(name).get("seen"):
            seen.write(folder)


def _read_seen(cfg: CfgNode) -> SeenImages:
    """Returns the images that ``MODEL.WEIGHTS`` were trained on and evaluated with.

    Warns if the weights are those of a detector or classifier, and nothing tells its images.
    """
    weights = Path(cfg.MODEL.WEIGHTS)
    if not weights.is_file():
        return SeenImages()
    seen = SeenImages.read(weights.parent)
    if (
        not (seen.train or seen.val)
        and weights.suffix == ".safetensors"
        and class_names_of(str(weights))
    ):
        logger.warning(
            f"'{weights}' is a trained model without '{SEEN_FILE}' beside it: if it was trained on "
            "some of the validation images, the results do not measure generalization"
        )
    return seen


def _find_shared(
    cfg: CfgNode,
    paths: Mapping[str, Sequence[str]],
    names: Mapping[str, str],
    seen: SeenImages,
    *,
    eval_only: bool,
) -> None:
    """Remembers which images a run has seen, and warns of validation images among them.

    Args:
        cfg: config of the run.
        paths: paths of the images, by role.
        names: names of the data sets, by role.
        seen: images that the initial weights have seen.
        eval_only: nothing is trained.
    """
    if sum(map(len, paths.values())) > _MOST_FINGERPRINTS:
        logger.info("There are too many images to remember them for later runs")
        return
    prints = {role: frozenset(fingerprint_images(own).values()) for role, own in paths.items()}
    own = prints.get("train", frozenset())
    val = prints.get("val", frozenset())
    if "train" in paths and not eval_only:
        MetadataCatalog.get(names["train"]).seen = seen.extend(own, val)
    counts = (
        (len(val & own), "training images"),
        (len(val & seen.train - own), f"training images of '{cfg.MODEL.WEIGHTS}'"),
    )
    texts = [
        f"{count:,} of {len(val):,} validation images are {what}" for count, what in counts if count
    ]
    if texts:
        text = " and ".join(texts)
        MetadataCatalog.get(names["val"]).shared = text
        logger.warning(f"{text}: the results do not measure generalization")


def open_flags(flags: RunFlags, job: str) -> dict[str, Source]:
    """Returns the sources that flags name, by role.

    "train" is the training part of --data or --images. "val" is --val or --val-images (its
    validation part if it has one), or else the validation part of --data.

    Raises:
        UserError: a path has no data for ``job`` (see ``find_job``), or images are missing.
    """
    opened: list[DataSource | None] = []
    pairs = ((flags.data, list(flags.images)), (flags.val, list(flags.val_images)))
    for path, images in pairs:
        if path:
            root, likely = "".join(images), "".join(flags.images)
            source = open_source(path, root, likely_root=likely)
            opened.append(source)
            if job != "images" and source.has_boxes != (job == "boxes"):
                kinds = ("boxes", "class folders")
                found, wanted = kinds if job == "classes" else reversed(kinds)
                raise UserError(f"'{path}' has {found}, but {wanted} are needed here")
        elif images:
            if job != "images":
                flag, needed = ("--val-images", "--val") if opened else ("--images", "--data")
                raise UserError(f"{flag} needs {needed}, which has the {job}")
            opened.append(open_images(images))
        else:
            opened.append(None)
    train, val = opened
    by_role = {
        "train": train and train.train,
        "val": (val.val or val.train) if val else train and train.val,
    }
    return {role: source for role, source in by_role.items() if source}


def _split(cfg: CfgNode, flags: RunFlags, source: Source, seen: SeenImages) -> Split:
    """Returns the split of a resumed run or of the run's first stage, or makes a new one.

    Images that the initial weights have seen keep their side.
    """
    folder, first = Path(cfg.OUTPUT_DIR), Path(cfg.OUTPUT_DIR) / FIRST_STAGE_WEIGHTS
    files = [folder / SPLIT_FILE] if flags.resume else []
    files += [first.with_name(SPLIT_FILE)] if cfg.MODEL.WEIGHTS == str(first) else []
    for file in filter(Path.is_file, files):
        return read_split(file)
    fraction, seed = cfg.DATASETS.VAL_FRACTION, max(cfg.SEED, 0)
    split = split_source(source, fraction=fraction, seed=seed, seen=seen)
    return {"data": os.path.abspath(str(flags.data)), **split}


def _find_held_out(cfg: CfgNode, flags: RunFlags, whole: Source) -> tuple[Source, Split | None]:
    """Returns the source to evaluate on, and its split.

    The source is the part that was held out in the training of the weights. If nothing was held
    out, it is the whole source, and the split is None.
    """
    folder = Path(cfg.OUTPUT_DIR if flags.resume else cfg.MODEL.WEIGHTS).absolute()
    file = (folder if flags.resume else folder.parent) / SPLIT_FILE
    if not file.is_file():
        return whole, None
    split = read_split(file)
    if split.get("data") != os.path.abspath(str(flags.data)):
        return whole, None
    logger.info(f"Evaluating on the {len(split['val']):,} images that '{file}' holds out")
    return whole.with_split(str(file), "val"), split


def _check_flags(flags: RunFlags, job: str) -> None:
    """Checks that the flags do not contradict each other or ``opts``, without reading data."""
    keys, given = flags.overrides, vars(flags)
    for flag, key in _KEYS.items():
        if given[flag] and key in keys:
            raise UserError(f"{key} and {_spell(flag)} both name data: choose one")
    for images, source in (("images", "data"), ("val_images", "val")):
        if given[source] and (count := len(given[images])) > 1:
            raise UserError(f"{_spell(images)} of {_spell(source)} is one folder, not {count}")
    if flags.unlabelled and (flags.eval_only or job != "boxes"):
        raise UserError("--unlabelled is for the training of detectors: leave it out")
    trains = flags.data or flags.images or "DATASETS.TRAIN" in keys or flags.eval_only
    if (flags.val or flags.val_images) and not trains and job != "images":
        raise UserError("--val alone evaluates: add --eval-only, or --data to train")


def use_classes_of_folders(cfg: CfgNode, *, eval_only: bool, resume: bool) -> None:
    """Sets the number and names of classes in place, and checks that all test sets have them.

    Training uses the classes of the training images. Evaluation uses the classes that the weights
    record, or else those of the config, or else those of the test images.

    Raises:
        UserError: a set has no labels, or has different classes.
    """
    names: list[str] = []
    if eval_only:
        last = name_last_checkpoint(Path(cfg.OUTPUT_DIR)) if resume else ""
        weights = str(Path(cfg.OUTPUT_DIR) / last) if last else cfg.MODEL.WEIGHTS
        names = list((weights and class_names_of(weights)) or cfg.MODEL.CLASS_NAMES)
    names = names or list_classes(cfg.DATASETS.TEST if eval_only else cfg.DATASETS.TRAIN)
    for dataset_name in cfg.DATASETS.TEST:
        load_classes([dataset_name], names)
    cfg.MODEL.CLASS_NAMES = names
    cfg.MODEL.CATEGORY_IDS = list(range(len(names)))
    cfg.MODEL.CLASSIFIER.NUM_CLASSES = len(names)


def _spell(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"

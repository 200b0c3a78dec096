# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The data sets of a run: opened, checked and registered once, and passed on as a ``RunData``.

``open_sources`` (``opened_sources.py``) opens what the flags name. ``prepare_data`` leaves out what
cannot be used, joins several data sets, holds out validation images, and registers the sets with
Detectron2, which reads them by their names.
"""

import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils import comm

from qbheat_det.checkpoint import class_names_of
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.core.image_files import find_elongation
from qbheat_det.data import (
    LEFT_OUT_FILE,
    SEEN_FILE,
    SPLIT_FILE,
    Account,
    Annotations,
    DataError,
    SeenImages,
    Source,
    check_image_folder,
    check_same_classes,
    count_annotated,
    describe_annotated,
    find_image_errors,
    find_record_errors,
    fingerprint_images,
    join_accounts,
    list_classes,
    load_classes,
    match_image_errors,
    open_images,
    raise_first,
    read_split,
    register_source,
    split_source,
)
from qbheat_det.data.datasets.sources import forget_source
from qbheat_det.evaluation import count_most_objects
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES, learns_partial_labels
from qbheat_det.tasks import TASKS, Task, find_task, find_task_of_data

from .opened_sources import (
    OpenedSource,
    Role,
    Sources,
    check_folders,
    find_images_of_both_parts,
    find_unvalidated,
    join_roles,
    join_sources,
)
from .run_flags import RunFlags, spell
from .run_record import FIRST_STAGE_FOLDER, Start

logger = logging.getLogger(__name__)

Split = Mapping[str, Any]
"""The content of a ``split.json``."""

UNLABELLED_SET = "custom_unlabelled"
CUSTOM_SETS = (*(name for task in TASKS for name in task.set_names), UNLABELLED_SET)
"""Names of the data sets that flags give."""

# Flags that set the names of data sets.
_KEYS = {
    "data": "DATASETS.TRAIN",
    "images": "DATASETS.TRAIN",
    "val": "DATASETS.TEST",
    "val_images": "DATASETS.TEST",
    "unlabelled": "DATASETS.UNLABELLED",
}
_BY_FLAGS = "given_by_flags"  # key of the metadata of sets that flags give
_MAX_FINGERPRINTS = 300_000  # images that are remembered in ``seen_images.json``


@dataclass(frozen=True)
class Draft:
    """What is known about a stage without its data.

    Attributes:
        cfg: config without the values that depend on the data.
        overrides: the values that the user has set for the stage, by config key.
        start: how the stage starts.
        kept_classes: classes of the weights that ``--keep-classes`` keeps.
    """

    cfg: CfgNode
    overrides: Mapping[str, str]
    start: Start
    kept_classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSet:
    """A data set that flags give, registered under ``name``.

    Attributes:
        name: name in Detectron2's ``DatasetCatalog``.
        source: what was read, as ``run.json`` records it.
        accounts: what is used and what is left out of each data set, by its path.
        num_images: number of images, after some have been held out.
        paths: paths of the images, if the data set has boxes or classes.
        broken: paths of the images that were left out because of faults in their files.
        max_objects: largest number of objects in an image.
        num_annotated: number of images in which each class is annotated, by name; empty if all
            classes are annotated in all images.
        load: function that returns the records.
        metadata: what Detectron2's ``MetadataCatalog`` knows of the data set.
    """

    name: str
    source: Source
    accounts: Mapping[str, Account]
    num_images: int
    paths: Sequence[str] = ()
    broken: Sequence[str] = ()
    max_objects: int = 0
    num_annotated: Mapping[str, int] = field(default_factory=dict)
    load: Callable[[], list[dict[str, Any]]] = field(default=list, repr=False)
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def register(self) -> None:
        """Registers the data set again if another run has taken its name."""
        if self.name in DatasetCatalog and DatasetCatalog[self.name] is self.load:
            return
        forget_source(self.name)
        DatasetCatalog.register(self.name, self.load)
        MetadataCatalog.get(self.name).set(
            **{key: value for key, value in self.metadata.items() if key != "name"}
        )


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        task: what the model learns.
        train, test, unlabelled: names of the data sets in Detectron2's ``DatasetCatalog``.
        given: the data sets that flags give.
        class_names: classes of the model; empty in pre-training.
        category_ids: ids of the classes in the annotations.
        max_objects_train, max_objects_test: largest number of objects in an image.
        split: images of ``--data`` that are held out; None if there are none.
        seen: images that the trained weights will have seen (main process).
        shared: a sentence about validation images that were trained on; "" if there are none.
    """

    task: Task
    train: tuple[str, ...]
    test: tuple[str, ...]
    unlabelled: tuple[str, ...] = ()
    given: tuple[DataSet, ...] = ()
    class_names: Sequence[str] = ()
    category_ids: Sequence[int] = ()
    max_objects_train: int = 0
    max_objects_test: int = 0
    split: Split | None = None
    seen: SeenImages | None = None
    shared: str = ""

    @property
    def accounts(self) -> dict[str, Account]:
        """The accounts of the data sets that flags give, by path."""
        accounts: dict[str, Account] = {}
        for data_set in self.given:
            accounts |= data_set.accounts
        return accounts

    def count_training_images(self) -> int:
        """Returns the number of training images, without unlabelled ones."""
        known = {data_set.name: data_set.num_images for data_set in self.given}
        total = 0
        for name in self.train:
            if name not in known:
                known[name] = len(DatasetCatalog.get(name))
            total += known[name]
        return total

    def describe(self) -> dict[str, Any]:
        """Returns the data of the run for ``run.json``."""
        broken = {path for data_set in self.given for path in data_set.broken}
        return {
            "data": {data_set.name: data_set.source.to_json() for data_set in self.given},
            "account": join_accounts(self.accounts.values()).to_json(),
            "shared_images": [self.shared] if self.shared else [],
            "broken_images": sorted(broken),
        }

    def register(self) -> None:
        """Registers the data sets that flags give again, if another run has taken their names."""
        for data_set in self.given:
            data_set.register()

    def write_files(self, folder: Path, *, is_temporary: bool = False) -> None:
        """Writes what was decided about the data into the folder of a run.

        These are ``split.json`` if some of the training images are held out, ``seen_images.json``,
        and ``left_out.txt`` if anything is left out. No message names a file in a temporary folder.
        """
        text = join_accounts(self.accounts.values()).render()
        if text:
            write_atomically(folder / LEFT_OUT_FILE, text.encode(errors="backslashreplace"))
        if self.split is not None:
            path = folder / SPLIT_FILE
            write_atomically(path, (json.dumps(self.split, indent=1) + "\n").encode())
            num_held_out = self.split.get("num_held_out", len(self.split["val"]))
            if not is_temporary:
                logger.info(f"{num_held_out:,} images are held out for evaluation, see '{path}'")
        if self.seen is not None:
            self.seen.write(folder)

    def log(self, folder: Path, *, is_temporary: bool = False) -> None:
        """Logs formats and sizes of the data sets that flags give, and what is left out.

        Args:
            folder: folder of the run, which has the list of what is left out.
            is_temporary: whether the folder will be removed. Then the message tells how to keep the
                list.
        """
        if not self.given:
            return
        titles = " and ".join(dict.fromkeys(data_set.source.title for data_set in self.given))
        sizes = " + ".join(f"{data_set.num_images:,}" for data_set in self.given)
        classes = ""
        if self.class_names:
            classes = f", {len(self.class_names)} classes"
        logger.info(f"Data: {titles}, {sizes} images{classes}")
        has_several = any(data_set.source.joined for data_set in self.given)
        for path, account in self.accounts.items():
            title = f"Used of '{path}'" if has_several else "Used"
            level = logging.WARNING if account.faults else logging.INFO
            listing = ""
            if account.left_out:
                listing = f" (see '{folder / LEFT_OUT_FILE}')"
                if is_temporary:
                    listing = f" (--output FOLDER keeps the list, {LEFT_OUT_FILE})"
            logger.log(level, f"{title}: {account.summarize()}{listing}")
            for note in account.notes:
                logger.info(f"Note: {note}")
        for data_set in self.given:
            if data_set.num_annotated:
                counts = describe_annotated(data_set.num_annotated, data_set.num_images)
                logger.info(f"{data_set.name}: {counts}")


def check_flags(flags: RunFlags, task: Task) -> None:
    """Checks that the flags that name data fit together, the overrides and the task.

    Raises:
        UserError: two flags name the same data, or a flag is not for the task.
    """
    for flag, key in _KEYS.items():
        if getattr(flags, flag) and key in flags.opts[::2]:
            raise UserError(f"{key} and {spell(flag)} both name data: choose one")
    check_folders(flags)
    has_several = len(flags.data_sets) > 1 or len(flags.val_sets) > 1
    if (has_several or flags.class_map) and not task.uses_boxes:
        raise UserError("several --data, several --val and --class-map are for detectors")
    if flags.class_map and not (flags.data or flags.val):
        raise UserError("--class-map renames the classes of --data or --val: name one of them")
    if flags.unlabelled_folders and (flags.eval_only or not task.uses_boxes):
        raise UserError("--unlabelled is for the training of detectors: leave it out")
    if not task.uses_labels:
        return
    names_training_set = flags.data or flags.images or "DATASETS.TRAIN" in flags.overrides
    if (flags.val or flags.val_images) and not (names_training_set or flags.eval_only):
        raise UserError("--val alone evaluates: add --eval-only, or --data to train")
    if flags.images and not flags.data:
        raise UserError(f"--images needs --data, which has {task.learns_from}")
    if flags.val_images and not flags.val:
        raise UserError(f"--val-images needs --val, which has {task.learns_from}")


def prepare_data(flags: RunFlags, sources: Sources, drafts: Sequence[Draft]) -> RunData:
    """Checks and registers the data sets of a run.

    Args:
        flags: flags of the run.
        sources: what the flags name, see ``open_sources``.
        drafts: the stages. The first one has the weights from which the run starts, and decides
            about faults and held-out images. The last one names the sets that no flag gives.

    Raises:
        UserError: the data do not fit the task, classes differ, or too many images or boxes have
            faults (``DATASETS.MAX_LEFT_OUT``).
    """
    first = drafts[0]
    last = drafts[-1]
    task = find_task(last.cfg)
    _check_task(flags, sources, task)
    unvalidated = find_unvalidated(flags, sources)
    chosen = _choose_roles(flags, sources, unvalidated)
    seen = SeenImages()
    if task.uses_labels:
        seen = _read_seen(first.cfg)
    if task.uses_boxes and _needs_joining(first.cfg, flags, chosen):
        used = _join_roles(flags, chosen, drafts)
    else:
        used = {role: opened for role, (opened,) in chosen.items()}
        if not task.uses_labels:
            used = {role: opened.without_labels() for role, opened in used.items()}
        elif task.uses_boxes:
            used = _choose_classes(first.cfg, flags, used)
        _check_sources(list(used.values()), drafts)
    split: Split | None = None
    if not flags.eval_only and not _holds_out(first.cfg, flags, task):
        unvalidated = ()
    in_both: Mapping[str, frozenset[str]] = {}
    if task.uses_boxes and "DATASETS.TEST" not in flags.overrides:
        in_both = find_images_of_both_parts(flags, sources)
    # The training parts with images of both sides.
    divided = list(unvalidated)
    for opened in sources.get("train", ()):
        is_divided = any(opened is one for one in unvalidated)
        if opened.source.path in in_both and not is_divided:
            divided.append(opened)
    if divided and flags.eval_only:
        used, split = _use_split_of_weights(first, flags, used, divided)
    elif divided:
        folder = Path(last.cfg.OUTPUT_DIR)
        left_out = frozenset().union(*in_both.values())
        split = _read_or_make_split(first, folder, flags, used, unvalidated, seen, left_out)
        used = _divide(used, divided, (folder / SPLIT_FILE).absolute())

    given: dict[Role, DataSet] = {}
    for role, opened in used.items():
        given[role] = _register(opened, task.set_names[role == "val"], split)
    _check_classes(first.cfg, flags, used, given, task)
    unlabelled = _list_registered(last.cfg.DATASETS.UNLABELLED)
    if flags.unlabelled_folders:
        register_source(UNLABELLED_SET, open_images(flags.unlabelled_folders).train)
        unlabelled = (UNLABELLED_SET,)
    train, test = _choose_names(last.cfg, flags, given)
    data = RunData(
        task,
        train=train,
        test=test,
        unlabelled=unlabelled,
        given=tuple(given.values()),
        split=None if flags.eval_only else split,
    )
    _check_names(data, eval_only=flags.eval_only)
    if not task.uses_labels:
        return data
    names, ids = _find_classes(last, data, eval_only=flags.eval_only)
    seen_after, shared = _compare_images(given, seen, first.cfg.MODEL.WEIGHTS)
    if seen_after and first.start.continues:
        _warn_of_replaced_images(SeenImages.read(first.start.folder), seen_after)
    return replace(
        data,
        class_names=names,
        category_ids=ids,
        max_objects_train=0 if flags.eval_only else count_objects(data, data.train),
        max_objects_test=count_objects(data, data.test),
        seen=None if flags.eval_only else seen_after,
        shared=shared,
    )


def _check_task(flags: RunFlags, sources: Sources, task: Task) -> None:
    """Checks that the data that the flags name are for a task."""
    given = {os.path.abspath(path): path for path in (*flags.data_sets, *flags.val_sets)}
    for opened in itertools.chain.from_iterable(sources.values()):
        if not task.fits(opened.source):
            path = given.get(opened.source.path, opened.source.path)
            kind = find_task_of_data(opened.source).learns_from
            raise UserError(f"'{path}' has {kind}, but {task.learns_from} are needed here")


def _choose_roles(
    flags: RunFlags, sources: Sources, unvalidated: Sequence[OpenedSource]
) -> dict[Role, Sequence[OpenedSource]]:
    """Returns the sources that a run uses. An evaluation uses all of them as validation data.

    ``unvalidated`` are the training sets without a validation part, of which an evaluation uses the
    training part.
    """
    used = dict(sources)
    if "DATASETS.TEST" in flags.overrides:
        used.pop("val", None)
    if not flags.eval_only:
        return used
    evaluated = [*used.get("val", ()), *unvalidated] or used.get("train", ())
    return {"val": evaluated} if evaluated else {}


def _needs_joining(cfg: CfgNode, flags: RunFlags, sources: Sources) -> bool:
    """Returns whether images may have some of the model's classes annotated only.

    This is so for several data sets, for one with other names of classes, for ``--keep-classes``,
    and for the evaluation of a model on data with some of its classes. Joining also brings the
    classes into the model's order: after ``--keep-classes``, few data sets have this order.
    """
    if flags.keep_classes or flags.class_map or any(len(opened) > 1 for opened in sources.values()):
        return True
    if not flags.eval_only or "val" not in sources:
        return False
    (opened,) = sources["val"]
    of_weights = _find_classes_of_weights(cfg, flags)
    is_part = set(opened.class_names) <= set(of_weights)
    is_other = tuple(opened.class_names) != of_weights
    return is_part and is_other and opened.source.lists_classes


def _find_classes_of_weights(cfg: CfgNode, flags: RunFlags) -> tuple[str, ...]:
    """Returns the classes of ``MODEL.WEIGHTS`` in an evaluation; () if they are unknown."""
    if flags.eval_only and not flags.resume and cfg.MODEL.WEIGHTS:
        return class_names_of(cfg.MODEL.WEIGHTS)
    return ()


def _join_roles(
    flags: RunFlags, sources: Sources, drafts: Sequence[Draft]
) -> dict[Role, OpenedSource]:
    """Joins the sources of each role to one, see ``join_roles``.

    Images that cannot be used are left out first, so that no data set has too many of them.
    """
    _check_sources(list(itertools.chain.from_iterable(sources.values())), drafts)
    cfg = drafts[0].cfg
    return join_roles(
        flags,
        sources,
        _find_classes_of_weights(cfg, flags),
        kept=drafts[-1].kept_classes,
    )


def _choose_classes(
    cfg: CfgNode, flags: RunFlags, sources: dict[Role, OpenedSource]
) -> dict[Role, OpenedSource]:
    """Sets the classes of sources whose label files do not list them.

    In evaluation, these are the classes of the weights. In training, both sets have the classes of
    the training set, or those of the validation set if they include all of the training set.
    """
    classes: Sequence[str] = _find_classes_of_weights(cfg, flags)
    if not classes and len(sources) == 2:
        of_train = sources["train"].class_names
        of_val = sources["val"].class_names
        classes = of_train
        if set(of_train) <= set(of_val):
            classes = of_val
    return {role: opened.with_classes(classes) for role, opened in sources.items()}


def _check_sources(sources: Sequence[OpenedSource], drafts: Sequence[Draft]) -> None:
    """Leaves out images of sources with boxes that cannot be used.

    A resumed run leaves out the same images as at its start. Images that have broken since then are
    replaced in training.

    Raises:
        UserError: more than ``DATASETS.MAX_LEFT_OUT`` of the images or boxes have faults.
    """
    start = drafts[0].start
    settings = drafts[0].cfg.DATASETS
    longest = min(get_longest_side(draft.cfg) for draft in drafts)
    checked: list[Annotations] = []  # both roles may have the same annotations
    for opened in sources:
        annotations = opened.annotations
        if annotations is None or any(annotations is other for other in checked):
            continue
        checked.append(annotations)
        if not opened.source.labelled:
            annotations.account.check(settings.MAX_LEFT_OUT, images_only=True)
            continue
        annotations.check()
        if start.continues:
            _leave_out_again(annotations, start.left_out)
        else:
            leave_out_images(annotations, longest, check_files=settings.CHECK_IMAGES)
        annotations.account.check(settings.MAX_LEFT_OUT)


def get_longest_side(cfg: CfgNode) -> float:
    """Returns the longest side of resized images in pixels; infinity if they are not resized."""
    return min(cfg.INPUT.MAX_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TEST) or math.inf


def _leave_out_again(annotations: Annotations, paths: Sequence[str]) -> None:
    """Leaves out the images at ``paths``, which the run has left out at its start."""
    names = {image["file_name"] for image in annotations.images}
    errors = {}
    for path in paths:
        name = os.path.relpath(path, annotations.image_root)
        if name in names:
            reason = "the run has left it out at its start"
            errors[name] = DataError("unreadable image", path, reason)
    annotations.leave_out(errors)


def leave_out_images(annotations: Annotations, longest: float, *, check_files: bool) -> None:
    """Leaves out images that cannot be used.

    Args:
        annotations: the images and boxes, which are changed.
        longest: longest side of resized images in pixels. An image is left out if its shorter side
            would be resized to zero pixels.
        check_files: whether to leave out images whose files are broken.
    """
    if annotations.problem:  # images without labels have no sizes
        return
    errors = {}
    for image in annotations.images:
        reason = find_elongation((image["height"], image["width"]), longest)
        if reason:
            name = image["file_name"]
            errors[name] = DataError("elongated image", f"image '{name}'", reason)
    if check_files:
        errors |= _find_broken(annotations)
    annotations.leave_out(errors)


def _find_broken(annotations: Annotations) -> dict[str, DataError]:
    """Returns the errors in the files of images, by name. The main process reads the files."""
    errors: dict[str, DataError] = {}
    if comm.is_main_process():
        names = {}
        records = []
        for image in annotations.images:
            path = os.path.join(annotations.image_root, image["file_name"])
            names[path] = image["file_name"]
            records.append({"file_name": path, "width": image["width"], "height": image["height"]})
        errors = {names[path]: error for path, error in match_image_errors(records).items()}
    return dict(comm.all_gather(errors)[0])


def _read_seen(cfg: CfgNode) -> SeenImages:
    """Returns the images that ``MODEL.WEIGHTS`` were trained on and evaluated with.

    Warns if the weights are those of a detector or classifier, and nothing tells its images.
    """
    weights = Path(cfg.MODEL.WEIGHTS)
    if not weights.is_file():
        return SeenImages()
    seen = SeenImages.read(weights.parent)
    is_unknown = not (seen.train or seen.val)
    if is_unknown and weights.suffix == ".safetensors" and class_names_of(str(weights)):
        logger.warning(
            f"'{weights}' is a trained model without '{SEEN_FILE}' beside it: if it was trained on "
            "some of the validation images, the results do not measure generalization"
        )
    return seen


def _find_split_of_weights(draft: Draft, flags: RunFlags) -> Path | None:
    """Returns the ``split.json`` of the training of the weights, if it divides ``--data``."""
    folder = Path(draft.cfg.MODEL.WEIGHTS).parent
    if draft.start.resume:
        folder = draft.start.folder
    file = folder.absolute() / SPLIT_FILE
    if not file.is_file():
        return None
    divided = read_split(file).get("data")
    if isinstance(divided, str):
        divided = [divided]
    paths = _list_paths(flags)
    if not paths or not set(paths) <= set(divided or ()):
        return None
    return file


def _list_paths(flags: RunFlags) -> list[str]:
    """Returns the absolute paths of --data."""
    return [os.path.abspath(path) for path in flags.data_sets]


def _use_split_of_weights(
    draft: Draft,
    flags: RunFlags,
    used: dict[Role, OpenedSource],
    divided: Sequence[OpenedSource],
) -> tuple[dict[Role, OpenedSource], Split | None]:
    """Evaluates only images that the training of the weights held out, if it divided --data.

    ``divided`` are the data sets that it divided. Returns the sources and the split; the same
    sources and None if there is no such split.
    """
    split_file = _find_split_of_weights(draft, flags)
    if split_file is None:
        return used, None
    split = read_split(split_file)
    logger.info(f"Evaluating on images of the {len(split['val']):,} that '{split_file}' holds out")
    return {"val": _add_members(used["val"], divided).with_split(split_file, "val")}, split


def _add_members(joined: OpenedSource, added: Sequence[OpenedSource]) -> OpenedSource:
    """Joins more data sets to several that are joined, unless they are among these."""
    known = {opened.source for opened in joined.members}
    new = [opened for opened in added if opened.source not in known]
    if not joined.members or not new:
        return joined
    members = (*joined.members, *new)
    return join_sources(members, joined.class_names, dict(joined.source.renamed))


def _divide(
    used: Mapping[Role, OpenedSource], divided: Sequence[OpenedSource], split_file: Path
) -> dict[Role, OpenedSource]:
    """Returns the training and the validation images of a split.

    Args:
        used: the training data, and validation data if some of several data sets have them.
        divided: the data sets whose training parts have images of both sides.
        split_file: path of the ``split.json`` with the paths or names of all images.
    """
    train = used["train"]
    evaluated = train
    if "val" in used:
        evaluated = _add_members(used["val"], divided)
    return {
        "train": train.with_split(split_file, "train"),
        "val": evaluated.with_split(split_file, "val"),
    }


def _holds_out(cfg: CfgNode, flags: RunFlags, task: Task) -> bool:
    """Returns whether a run without validation data holds out a share of its training images."""
    if not task.uses_labels or "DATASETS.TEST" in flags.overrides:
        return False
    return bool(cfg.DATASETS.VAL_FRACTION)


def _read_or_make_split(
    draft: Draft,
    folder: Path,
    flags: RunFlags,
    used: Mapping[Role, OpenedSource],
    unvalidated: Sequence[OpenedSource],
    seen: SeenImages,
    in_both: frozenset[str],
) -> Split:
    """Returns the split of a resumed run, or makes a new one.

    Images that are in a data set with a validation part stay in their part.

    Args:
        draft: first stage of the run.
        folder: ``OUTPUT_DIR`` of the run.
        flags: flags of the run.
        used: the training data, and validation data if some of several data sets have them.
        unvalidated: the data sets of which a share is held out.
        seen: images that the initial weights have seen, which keep their side.
        in_both: paths of training images that are in a validation part too.
    """
    if draft.start.resume:
        for file in (folder / SPLIT_FILE, folder / FIRST_STAGE_FOLDER / SPLIT_FILE):
            if file.is_file():
                return read_split(file)
    opened = used["train"]
    own_val: list[str] = []
    if "val" in used:
        divided = {member.source.path for member in unvalidated}
        own = [member for member in opened.members if member.source.path not in divided]
        own_train = [path for member in own for path in member.list_paths()]
        own_val = used["val"].list_paths()
        seen = seen.extend(
            fingerprint_images(own_train).values(), fingerprint_images(own_val).values()
        )
    if not unvalidated:
        split: dict[str, Any] = {"train": opened.list_paths(), "val": []}
    else:
        split = split_source(
            opened.source,
            opened.annotations,
            fraction=draft.cfg.DATASETS.VAL_FRACTION,
            seen=seen,
            has_val=bool(own_val),
        )
    train = [path for path in split["train"] if path not in in_both]
    held_out = [path for path in split["val"] if path not in in_both]
    if not train:
        raise UserError(
            "all training images of --data are validation images of another data set: name the "
            "validation images with --val"
        )
    paths = _list_paths(flags)
    data = paths[0] if len(paths) == 1 else paths
    num_held_out = len(held_out)  # without the images of validation parts
    sides = {"train": train, "val": [*held_out, *own_val]}
    return {"data": data, "num_held_out": num_held_out, **split, **sides}


def _register(opened: OpenedSource, name: str, split: Split | None) -> DataSet:
    """Registers a source, or its part of a split, as a data set."""
    source = opened.source
    keep = None
    if split is not None and source.split_part:
        keep = frozenset(split[source.split_part])
        if opened.annotations is not None:
            keep = opened.annotations.find_names(keep)
    register_source(name, source, annotations=opened.annotations, keep=keep)
    num_images = opened.account.used["image"]
    paths: list[str] = []
    broken: Sequence[str] = ()
    max_objects = 0
    num_annotated: dict[str, int] = {}
    if opened.annotations is not None:
        lists = opened.annotations.keep(keep)
        root = opened.annotations.image_root
        paths = [os.path.join(root, image["file_name"]) for image in lists["images"]]
        num_images = len(paths)
        broken = opened.annotations.broken
        max_objects = count_most_objects(lists["annotations"])
        if source.labelled:
            num_annotated = count_annotated(lists)
    elif source.labelled:
        paths = [record["file_name"] for record in DatasetCatalog.get(name)]
        num_images = len(paths)
    metadata = MetadataCatalog.get(name)
    metadata.set(**{_BY_FLAGS: True})
    return DataSet(
        name,
        source,
        opened.accounts,
        num_images,
        paths,
        broken,
        max_objects,
        num_annotated,
        load=DatasetCatalog[name],
        metadata=dict(metadata.as_dict()),
    )


def _check_classes(
    cfg: CfgNode,
    flags: RunFlags,
    sources: Mapping[Role, OpenedSource],
    given: Mapping[Role, DataSet],
    task: Task,
) -> None:
    """Checks that both sets have the same classes, and that there are two class folders."""
    annotations = [opened.annotations for opened in sources.values() if opened.annotations]
    if task.uses_boxes and len(annotations) == 2:
        check_same_classes(*annotations)
    if task.uses_class_folders:
        for data_set in given.values():
            for account in data_set.accounts.values():
                account.check(cfg.DATASETS.MAX_LEFT_OUT)
        if "train" in given:
            names = list_classes([given["train"].name])
            if len(names) < 2:
                raise UserError(f"'{flags.data_sets[0]}' has images of one class, '{names[0]}'")


def _list_registered(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names without those of sets that only the flags of an earlier run have given.

    The user may have registered sets with the same names.
    """
    kept = []
    for name in names:
        is_of_user = name in DatasetCatalog and not MetadataCatalog.get(name).get(_BY_FLAGS)
        if name not in CUSTOM_SETS or is_of_user:
            kept.append(name)
    return tuple(kept)


def _choose_names(
    cfg: CfgNode, flags: RunFlags, given: Mapping[Role, DataSet]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the training sets and of the test sets."""
    train = _list_registered(cfg.DATASETS.TRAIN)
    test = _list_registered(cfg.DATASETS.TEST)
    if "train" in given:
        train = (given["train"].name,)
        if "DATASETS.TEST" not in flags.overrides:
            test = ()  # a recipe's test sets do not fit custom training images
    if "val" in given:
        test = (given["val"].name,)
    return train, test


def _check_names(data: RunData, *, eval_only: bool) -> None:
    """Checks that the data sets are registered and have files, without reading them."""
    names = data.test
    if not eval_only:
        names = (*data.train, *data.test)
    if not names or not (eval_only or data.train):
        raise UserError(f"the config names no data set: {data.task.data_flags}")
    for name in names:
        _check_name(name, data.task, is_test=name in data.test)


def _check_name(name: str, task: Task, *, is_test: bool) -> None:
    if name not in DatasetCatalog:
        raise UserError(f"there is no data set '{name}': {task.data_flags}, or register it")
    metadata = MetadataCatalog.get(name)
    is_unlabelled = metadata.get("unlabelled")
    if is_unlabelled and task.uses_boxes:
        raise UserError(f"data set '{name}' has no annotations, as a detector needs")
    if is_test and not task.uses_boxes and not is_unlabelled:
        raise UserError(
            f"DATASETS.TEST names '{name}', which has annotations, but {task.name} is evaluated on "
            f"images alone: {task.data_flags}"
        )
    advice = f"set $DETECTRON2_DATASETS, or {task.data_flags}"
    for folder in metadata.get("image_folders", ()):
        try:
            check_image_folder(folder)
        except UserError as error:
            raise UserError(f"data set '{name}': {error}; {advice}") from error
    json_file = metadata.get("json_file")
    if json_file and not os.path.isfile(json_file):
        raise UserError(f"data set '{name}' has no annotations at '{json_file}': {advice}")


def _find_classes(
    draft: Draft, data: RunData, *, eval_only: bool
) -> tuple[Sequence[str], Sequence[int]]:
    """Returns the names of the classes, and their ids in the annotations."""
    if data.task.uses_class_folders:
        names = _find_folder_classes(draft, data, eval_only=eval_only)
        return names, range(len(names))
    name = data.test[0] if eval_only else data.train[0]
    metadata = MetadataCatalog.get(name)
    if not metadata.get("thing_classes"):
        DatasetCatalog.get(name)  # Detectron2 reads the names from the COCO file
    names = metadata.get("thing_classes")
    if not names:
        raise UserError(f"the metadata of data set '{name}' has no 'thing_classes'")
    indices = metadata.get("thing_dataset_id_to_contiguous_id") or {}
    ids = sorted(indices, key=indices.__getitem__) or range(len(names))
    return names, ids


def _find_folder_classes(draft: Draft, data: RunData, *, eval_only: bool) -> list[str]:
    """Returns the class names of class folders, and checks that all test sets have them.

    Training uses the classes of the training images. Evaluation uses the classes that the weights
    record, or else those of the config, or else those of the test images.
    """
    names: list[str] = []
    if eval_only:
        weights = draft.cfg.MODEL.WEIGHTS
        if draft.start.continues:
            weights = str(draft.start.folder / draft.start.checkpoint)
        names = list(draft.cfg.MODEL.CLASS_NAMES)
        if weights:
            names = list(class_names_of(weights)) or names
    if not names:
        names = list_classes(data.test if eval_only else data.train)
    for name in data.test:
        load_classes([name], names)
    return names


def _compare_images(
    given: Mapping[Role, DataSet], seen: SeenImages, weights: str
) -> tuple[SeenImages | None, str]:
    """Returns the images that a run will have seen, and a sentence about those on both sides.

    The main process compares the contents of the files. Warns of validation images that are
    training images, of this run or of the run that trained ``weights``.
    """
    if not given or not comm.is_main_process():
        return None, ""
    num_images = sum(len(data_set.paths) for data_set in given.values())
    if num_images > _MAX_FINGERPRINTS:
        logger.info("There are too many images to remember them for later runs")
        return None, ""
    prints = {
        role: frozenset(fingerprint_images(data_set.paths).values())
        for role, data_set in given.items()
    }
    train = prints.get("train", frozenset())
    val = prints.get("val", frozenset())
    shared = {
        "training images": val & train,
        f"training images of '{weights}'": val & seen.train - train,
    }
    counts = [
        f"{len(images):,} of {len(val):,} validation images are {kind}"
        for kind, images in shared.items()
        if images
    ]
    text = " and ".join(counts)
    if text:
        logger.warning(f"{text}: the results do not measure generalization")
    if "train" not in given:
        return None, text
    return seen.extend(train, val), text


def _warn_of_replaced_images(before: SeenImages, now: SeenImages) -> None:
    """Warns if a resumed run has images whose files had other contents at its last start."""
    known = before.train | before.val
    current = now.train | now.val
    replaced = current - known
    if known and replaced:
        logger.warning(
            f"{len(replaced):,} of {len(current):,} images have other contents than at the last "
            "start of this run, although their names and boxes are the same"
        )


def count_objects(data: RunData, names: Sequence[str]) -> int:
    """Returns the largest number of objects in an image; equal on all processes."""
    if not data.task.uses_boxes:
        return 0
    known = {data_set.name: data_set.max_objects for data_set in data.given}
    most = 0
    if comm.is_main_process():
        for name in names:
            if name not in known:
                known[name] = _count_objects_of(name)
            most = max(most, known[name])
    return comm.all_gather(most)[0]


def _count_objects_of(name: str) -> int:
    """Returns the largest number of objects in an image of a registered data set."""
    return count_most_objects(
        {**annotation, "image_id": index}
        for index, record in enumerate(DatasetCatalog.get(name))
        for annotation in record.get("annotations", ())
    )


def check_records(cfgs: Sequence[CfgNode], data: RunData, *, eval_only: bool) -> None:
    """Reads the records of a run's data sets on the main process, to find errors early.

    With ``DATASETS.CHECK_IMAGES``, also reads the image files of sets that no flag has given. (The
    others are checked when they are opened.)

    Args:
        cfgs: the configs of all stages.
        data: the data of the run.
        eval_only: nothing is trained.

    Raises:
        UserError: a record or an image is invalid.
    """
    if not comm.is_main_process():
        return
    is_detector = data.task.uses_boxes
    names = data.test
    if is_detector and not eval_only:
        names = (*data.train, *data.test)
    for name in names:
        records = DatasetCatalog.get(name)
        if not is_detector:
            continue
        if name in data.train and not eval_only:
            _check_partial_labels(cfgs, name, records, num_classes=len(data.class_names))
        for cfg in cfgs:
            is_only_training_set = data.train == (name,)  # the sets are filtered together
            filters = is_only_training_set and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
            errors = find_record_errors(
                name,
                records,
                num_classes=len(data.class_names),
                filter_empty=filters,
                mask_format=cfg.INPUT.MASK_FORMAT if cfg.MODEL.MASK_ON else None,
                longest=get_longest_side(cfg),
            )
            raise_first(errors)
        if cfgs[-1].DATASETS.CHECK_IMAGES and name not in CUSTOM_SETS:
            raise_first(find_image_errors(records))


def _check_partial_labels(
    cfgs: Sequence[CfgNode], name: str, records: Sequence[Mapping[str, Any]], *, num_classes: int
) -> None:
    """Refuses images that are annotated for some classes only, if a model cannot learn from them.

    Such a model would learn that the objects without labels are background.
    """
    num_partial = 0
    for record in records:
        annotated = record.get(ANNOTATED_CLASSES)
        if annotated is not None and len(set(annotated)) < num_classes:
            num_partial += 1
    if not num_partial:
        return
    for cfg in cfgs:
        architecture = cfg.MODEL.META_ARCHITECTURE
        if not learns_partial_labels(META_ARCH_REGISTRY.get(architecture)):
            raise UserError(
                f"{num_partial:,} of {len(records):,} images of '{name}' are labelled for some of "
                f"the {num_classes} classes only, from which {architecture} cannot learn: use a "
                "recipe of RetinaNet, FCOS or MF-DETR, or label all classes"
            )

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The data of a run as values: the draft of a stage, a data set, and ``RunData``.

``prepare_data`` (``data_preparation.py``) makes them, and nothing changes them afterwards.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.files import write_atomically
from qbheat_det.data import (
    LEFT_OUT_FILE,
    SPLIT_FILE,
    Account,
    SeenImages,
    Source,
    describe_annotated,
    forget_source,
    join_accounts,
)
from qbheat_det.tasks import Task

from .run_record import Start

logger = logging.getLogger(__name__)

Split = Mapping[str, Any]
"""The content of a ``split.json``."""


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
        has_several = len(self.accounts) > 1
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

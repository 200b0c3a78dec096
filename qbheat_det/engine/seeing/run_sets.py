# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The data sets of a finished run, registered again.

``config.yaml`` has names only; ``run.json`` has the files and folders of sets that flags named.
They are registered under names of the run's own: of two runs that are compared, each may have its
own ``custom_val``.
"""

from pathlib import Path
from typing import Any, Literal

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.engine.data_flags import CUSTOM_SETS
from qbheat_det.engine.data_sources import register_source
from qbheat_det.engine.run_record import RUN_FILE, read_run_record

from .refusal import NothingToSee

Split = Literal["test", "train"]


def find_run_set(cfg: CfgNode, folder: Path | None, split: Split) -> str:
    """Returns the name under which the first set of a split is registered here.

    Args:
        cfg: of the run.
        folder: of the run, with ``run.json``; None if there is none.
        split: "test" for the set that the run was evaluated on.

    Raises:
        NothingToSee: the run had no such set, or it is not here.
    """
    names = cfg.DATASETS.TEST if split == "test" else cfg.DATASETS.TRAIN
    if not names:
        raise NothingToSee(f"the config names no {split} set")
    name = str(names[0])
    try:
        if name in CUSTOM_SETS:
            source = read_sources(folder).get(name)
            if source is None:
                raise NothingToSee(f"flags named the {split} set, and no {RUN_FILE} has its paths")
            name = f"{name} of {folder}"
            register_source(name, source)
        if name not in DatasetCatalog:
            raise NothingToSee(f"the {split} set '{name}' is not registered here")
        DatasetCatalog.get(name)
    except (UserError, OSError) as error:
        raise NothingToSee(f"the {split} set cannot be read here: {error}") from error
    return name


def read_sources(folder: Path | None) -> dict[str, Any]:
    """Returns the sources in the newest start of a run, by data set; see ``find_sources``."""
    starts = read_run_record(folder / RUN_FILE) if folder is not None else []
    sources = starts[-1].get("data", {}) if starts else {}
    return sources if isinstance(sources, dict) else {}

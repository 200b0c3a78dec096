# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Verifies that an entry's file, the index and today's code agree on this machine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from detectron2.modeling import Backbone
from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.analysis import CountingRule, count_detector_madds, count_madds, count_parameters
from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line
from qbheat_det.data import MAPPERS_OF_CLASSES, MAPPERS_OF_IMAGES
from qbheat_det.modeling.contracts import PretrainingObjective

from .api import TrainedModel, open_trained
from .fingerprint import TOLERANCE, compare_fingerprints, compute_fingerprint
from .index import Fingerprint, ZooEntry
from .sources import fetch


@dataclass(frozen=True)
class Verdict:
    """Result of each step of verification, "-" for a step that was not reached."""

    name: str
    file: str = "-"  # its hash and size
    load: str = "-"  # number of tensors that were filled, of all
    index: str = "-"  # task and costs
    fingerprint: str = "-"  # largest deviation relative to its tolerance
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON, and ``is_verified``."""
        return {**asdict(self), "is_verified": not self.error}


def verify_entry(entry: ZooEntry) -> Verdict:
    """Fetches an entry, fills its model, and compares costs and outputs with the index.

    Whatever is wrong with the entry is in the verdict and not raised.
    """
    steps: dict[str, str] = {}
    try:
        get_config_path(entry.config)
        file = fetch(entry)
        _check_equal("size", entry.size, file.stat().st_size)
        steps["file"] = "ok"
        trained = open_trained(str(file), device="cpu")
        assert trained.report is not None
        groups = trained.report.groups.values()
        total = sum(group.num_tensors for group in groups)
        steps["load"] = f"{trained.report.num_loaded} of {total}"
        for field, found in {"task": find_task(trained), **count_costs(trained)}.items():
            _check_equal(field, getattr(entry, field), found)
        steps["index"] = "ok"
        if entry.fingerprint is None:
            raise UserError("the index has no fingerprint: add the entry again with --replace")
        found = compute_fingerprint(trained.model, trained.cfg)
        steps["fingerprint"] = check_fingerprint(entry.fingerprint, found)
    except UserError as error:
        return Verdict(entry.name, **steps, error=str(error))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:  # of a model's own code
        reason = f"{type(error).__name__}: {one_line(error)}"
        return Verdict(entry.name, **steps, error=f"the model does not run: {reason}")
    return Verdict(entry.name, **steps)


def format_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Returns a table of the steps, then one line per error."""
    headers = ("name", "file and hash", "tensors loaded", "index", "fingerprint")
    rows = [(v.name, v.file, v.load, v.index, v.fingerprint) for v in verdicts]
    errors = [f"{v.name}: {v.error}" for v in verdicts if v.error]
    end = (
        f"{len(verdicts) - len(errors)} of {len(verdicts)} verified: raw outputs may differ by "
        f"{TOLERANCE:g} of their standard deviation."
    )
    return "\n".join([tabulate(rows, headers, tablefmt="github"), *errors, end])


def find_task(trained: TrainedModel) -> str:
    """Returns one of the zoo's tasks."""
    if isinstance(trained.model, Backbone | PretrainingObjective):
        return "pretraining"
    is_classifier = trained.cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES
    return "classification" if is_classifier else "detection"


def count_costs(trained: TrainedModel) -> dict[str, Any]:
    """Returns ``num_params``, ``madds`` and ``madds_input`` of an entry.

    Multiply-adds are of ``CountingRule.CORE`` on an image of the size of evaluation, for detectors
    in landscape; of a pre-training objective those of its backbone.
    """
    model, cfg = trained.model, trained.cfg
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_IMAGES:
        height = width = int(cfg.INPUT.PRETRAIN.SIZE)
    else:
        height, width = int(cfg.INPUT.MIN_SIZE_TEST), int(cfg.INPUT.MAX_SIZE_TEST)
        height = height or width  # 0 does not resize
    if find_task(trained) == "pretraining":
        backbone = model if isinstance(model, Backbone) else model.get_submodule("backbone")
        image = next(backbone.parameters()).new_zeros(1, 3, height, width)
        madds = count_madds(backbone, image)
    else:
        madds = count_detector_madds(model, height, width)
    return {
        "num_params": count_parameters(model),
        "madds": madds.total(CountingRule.CORE),
        "madds_input": (height, width),
    }


def check_fingerprint(expected: Fingerprint, found: Fingerprint) -> str:
    """Returns the largest deviation, such as "ok, 3 % of tolerance".

    Raises:
        UserError: an output differs; names the first one in the order of computation.
    """
    deviations = compare_fingerprints(expected, found)
    wrong = [deviation for deviation in deviations if deviation.ratio > 1]
    if not wrong:
        return f"ok, {100 * max(one.ratio for one in deviations):.2g} % of tolerance"
    more = f" (and {len(wrong) - 1} more of {len(deviations)} outputs)" if wrong[1:] else ""
    raise UserError(f"output '{wrong[0].output}': {wrong[0].reason}{more}")


def _check_equal(field: str, expected: object, found: object) -> None:
    if expected != found:
        raise UserError(f"'{field}' in the index is {expected}, but of the file it is {found}")

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Verifies that an entry's file, the index and today's code agree on this machine."""

from collections.abc import Mapping, Sequence
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

_STEPS = ("file and hash", "tensors loaded", "index", "fingerprint")


def verify_entry(entry: ZooEntry) -> dict[str, str]:
    """Returns "name", the result of each step ("-" if not reached) and "error" of an entry."""
    verdict = {"name": entry.name, **dict.fromkeys(_STEPS, "-"), "error": ""}
    try:
        get_config_path(entry.config)
        file = fetch(entry)
        _check_equal("size", entry.size, file.stat().st_size)
        verdict["file and hash"] = "ok"
        trained = open_trained(str(file), device="cpu")
        assert trained.report is not None
        total = sum(group.num_tensors for group in trained.report.groups.values())
        verdict["tensors loaded"] = f"{trained.report.num_loaded} of {total}"
        for field, found in {"task": find_task(trained), **count_costs(trained)}.items():
            _check_equal(field, getattr(entry, field), found)
        verdict["index"] = "ok"
        if entry.fingerprint is None:
            raise UserError("the index has no fingerprint: add the entry again with --replace")
        found = compute_fingerprint(trained.model, trained.cfg)
        verdict["fingerprint"] = check_fingerprint(entry.fingerprint, found)
    except UserError as error:
        verdict["error"] = str(error)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:  # of a model's own code
        reason = f"{type(error).__name__}: {one_line(error)}"
        verdict["error"] = f"the model does not run: {reason}"
    return verdict


def format_verdicts(verdicts: Sequence[Mapping[str, str]]) -> str:
    """Returns a table of the steps, then one line per error."""
    rows = [[verdict[column] for column in ("name", *_STEPS)] for verdict in verdicts]
    errors = [f"{verdict['name']}: {verdict['error']}" for verdict in verdicts if verdict["error"]]
    end = (
        f"{len(verdicts) - len(errors)} of {len(verdicts)} verified: raw outputs may differ by "
        f"{TOLERANCE:g} of their standard deviation."
    )
    return "\n".join([tabulate(rows, ("name", *_STEPS), tablefmt="github"), *errors, end])


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
    """Returns the largest deviation, such as "ok, 3 % of tolerance", or raises a ``UserError``."""
    deviations = compare_fingerprints(expected, found)
    wrong = [deviation for deviation in deviations if deviation.ratio > 1]
    if not wrong:
        return f"ok, {100 * max(one.ratio for one in deviations):.2g} % of tolerance"
    more = f" (and {len(wrong) - 1} more of {len(deviations)} outputs)" if wrong[1:] else ""
    raise UserError(f"output '{wrong[0].output}': {wrong[0].reason}{more}")


def _check_equal(field: str, expected: object, found: object) -> None:
    if expected != found:
        raise UserError(f"'{field}' in the index is {expected}, but of the file it is {found}")

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every sight of several runs, for one report: what can be made, and why the rest cannot."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detectron2.config import CfgNode
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.analysis.charts import has_step
from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.core.errors import UserError

from .options import Sight, SightOptions
from .refusal import NothingToSee
from .subject import Subject

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of one sight.

    Attributes:
        sight: of the table.
        exhibit: None where it could not be made.
        reason: why not; "" where it could.
        is_failure: whether something went wrong, rather than there being nothing to see.
    """

    sight: Sight
    exhibit: Exhibit | None = None
    reason: str = ""
    is_failure: bool = False


def gather(
    sights: Sequence[Sight],
    subjects: Sequence[Subject],
    options_of: Callable[[Sight], SightOptions],
    *,
    progress: bool = False,
) -> Iterator[Outcome]:
    """Makes one sight of all subjects after another; what goes wrong in one costs that one alone.

    Args:
        sights: in the order of the report.
        subjects: side by side in each.
        options_of: what is asked of a sight.
        progress: show a bar with the time that is left, which assumes that sights take alike.
    """
    with tqdm(sights, unit="sight", disable=not progress) as bar:
        for sight in bar:
            bar.set_postfix_str(sight.name)
            yield _look(sight, subjects, options_of(sight))


def _look(sight: Sight, subjects: Sequence[Subject], options: SightOptions) -> Outcome:
    try:
        return Outcome(sight, sight.see(subjects, options))
    except NothingToSee as reason:
        return Outcome(sight, reason=str(reason))
    except UserError as error:
        return Outcome(sight, reason=str(error), is_failure=True)
    except Exception as error:  # a report of an hour must not be lost to one section
        logger.exception("'%s' failed; the report goes on without it", sight.name)
        return Outcome(sight, reason=f"{type(error).__name__}: {error}", is_failure=True)


def describe_subjects(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Returns for each subject what a reader should know first, as far as its files tell.

    Keys: "label", "kind", "model", "backbone", "weights" (name of the file), "steps", "epochs",
    "images" (seen), None where unknown; and "fault", a sentence where the config cannot be read.
    """
    return [_describe(subject) for subject in subjects]


def _describe(subject: Subject) -> dict[str, Any]:
    about: dict[str, Any] = {"label": subject.label, "fault": ""}
    unknown = ("kind", "model", "backbone", "weights", "steps", "epochs", "images")
    about.update(dict.fromkeys(unknown))
    last = _find_last(subject.metrics)
    about["steps"] = int(last["iteration"]) + 1 if last else None
    about["epochs"] = last.get("epoch")
    try:
        about["weights"] = subject.weights.name
    except (NothingToSee, UserError) as error:
        about["fault"] = str(error)
    try:
        cfg = subject.cfg
    except (NothingToSee, UserError) as error:
        about["fault"] = about["fault"] or str(error)
        return about
    about["kind"] = subject.kind
    about["model"] = cfg.MODEL.META_ARCHITECTURE
    about["backbone"] = _name_backbone(cfg)
    if about["steps"] is not None:
        about["images"] = about["steps"] * int(cfg.SOLVER.IMS_PER_BATCH)
    return about


def _name_backbone(cfg: CfgNode) -> str:
    """Returns the encoder's name, also where a feature pyramid stands on it."""
    pyramids = {
        "build_fpn_backbone": cfg.MODEL.FPN.BOTTOM_UP,
        "build_mobile_former_fpn_backbone": "MobileFormer",
    }
    name = str(cfg.MODEL.BACKBONE.NAME)
    return f"{pyramids[name]} below an FPN" if name in pyramids else name


def _find_last(metrics: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    found = [record for record in metrics if has_step(record)]
    return max(found, key=lambda record: record["iteration"], default={})

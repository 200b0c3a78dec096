# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the evaluation at the end of a run left behind.

A file of it tells of the weights that are looked at only where these are the run's last. Whoever
reads one compares its figure with the one that was logged then: a file of an earlier evaluation,
of another set or cut short gives another.
"""

import json
import math
from typing import Any

from .subject import Subject


def read_last_evaluation(subject: Subject, file_name: str) -> Any:
    """Returns the content of a JSON file of the first test set, unchecked; None if there is none.

    Args:
        subject: a run; weights alone have none.
        file_name: below ``inference/<test set>``.
    """
    if subject.folder is None or subject.weights.stem != "model_final":
        return None
    tested = subject.cfg.DATASETS.TEST
    path = subject.folder / "inference" / (str(tested[0]) if tested else "") / file_name
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def get_last_logged(subject: Subject, key: str) -> float:
    """Returns a figure that was logged with the last step of a run; nan if it was not."""
    records = [record for record in subject.metrics if "iteration" in record]
    last = max((record["iteration"] for record in records), default=-1)
    found = [r[key] for r in records if r["iteration"] == last and key in r]
    return float(found[-1]) if found else math.nan

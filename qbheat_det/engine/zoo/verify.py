# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Proof, on this machine, that an entry's file, its index and today's code still agree."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo.download import check_hash
from qbheat_det.model_zoo.fingerprint import (
    TOLERANCE,
    Deviation,
    compare_fingerprints,
    compute_fingerprint,
)
from qbheat_det.model_zoo.index import Fingerprint, ZooEntry
from qbheat_det.model_zoo.places import fetch

from .trained_model import TrainedModel, count_costs, open_trained

_OK, _NOT_REACHED = "ok", "-"


@dataclass(frozen=True)
class Verdict:
    """What became of an entry; each step is a word or two, "-" where none was taken.

    Attributes:
        name: of the entry.
        file: fetched, with the hash and the size of the index.
        index: whether what the index says of the model is so.
        load: tensors that were filled, of all that the model has.
        fingerprint: the largest deviation, in parts of what is tolerated.
        fault: the sentence that says what is wrong; empty where all is well.
    """

    name: str
    file: str = _NOT_REACHED
    index: str = _NOT_REACHED
    load: str = _NOT_REACHED
    fingerprint: str = _NOT_REACHED
    fault: str = ""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.fault

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON takes."""
        return {**asdict(self), "is_sound": self.is_sound}


def verify_entry(entry: ZooEntry) -> Verdict:
    """Fetches an entry, builds and fills its model, and compares what it gives with the index.

    What is wrong is told in the verdict; nothing is raised for a person's entry.
    """
    steps: dict[str, str] = {}
    try:
        file = _check_file(entry)
        steps["file"] = _OK
        trained = open_trained(str(file))
        loaded, of = trained.num_loaded
        steps["load"] = f"{loaded} of {of}"
        _check_index(entry, trained)
        steps["index"] = _OK
        steps["fingerprint"] = _check_fingerprint(entry, trained)
    except UserError as error:
        return Verdict(entry.name, **steps, fault=str(error))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:  # of a model's own code
        sentence = " ".join(f"{type(error).__name__}: {error}".split())
        return Verdict(entry.name, **steps, fault=f"the model does not run: {sentence}")
    return Verdict(entry.name, **steps)


def verify_all(
    entries: Iterable[ZooEntry], tell: Callable[[Verdict], object] = lambda verdict: None
) -> list[Verdict]:
    """Verifies entries one by one; ``tell`` hears of each as soon as it is done."""
    verdicts = []
    for entry in entries:
        verdicts.append(verify_entry(entry))
        tell(verdicts[-1])
    return verdicts


def describe(verdicts: Sequence[Verdict]) -> str:
    """Returns a table of the steps, then a line for each fault."""
    headers = ("name", "file and hash", "tensors loaded", "index", "fingerprint")
    rows = [(v.name, v.file, v.load, v.index, v.fingerprint) for v in verdicts]
    faults = [f"{v.name}: {v.fault}" for v in verdicts if not v.is_sound]
    sound = len(verdicts) - len(faults)
    end = (
        f"{sound} of {len(verdicts)} verified: raw outputs may differ by {TOLERANCE:g} of their "
        "standard deviation."
    )
    table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    return "\n".join([table, *faults, end])


def _check_file(entry: ZooEntry) -> Path:
    get_config_path(entry.config)
    file = fetch(entry)
    # Some places were hashed when they were filled; here the bytes of today count.
    check_hash(file, entry.sha256, "copy or fetch it anew")
    size = file.stat().st_size
    if size != entry.size:
        raise UserError(f"the file has {size} bytes, but the index says {entry.size}")
    return file


def _check_index(entry: ZooEntry, trained: TrainedModel) -> None:
    costs = count_costs(trained)
    pairs: dict[str, tuple[object, object]] = {
        "task": (entry.task, trained.task),
        "num_params": (entry.num_params, costs.num_params),
        "madds_input": (entry.madds_input, costs.madds_input),
        "madds": (entry.madds, costs.madds),
    }
    for field, (said, found) in pairs.items():
        if said != found:
            raise UserError(f"the index says {field} {said}, but of the file it is {found}")


def _check_fingerprint(entry: ZooEntry, trained: TrainedModel) -> str:
    if entry.fingerprint is None:
        raise UserError("the index has no fingerprint: add the entry anew with --replace")
    found = compute_fingerprint(trained.model, trained.cfg)
    return judge(entry.fingerprint, found)


def judge(expected: Fingerprint, found: Fingerprint) -> str:
    """Compares two fingerprints.

    Returns:
        The largest deviation in words, where all outputs count as the same.

    Raises:
        UserError: they do not; names the first output in the order of computation, and how many.
    """
    deviations = compare_fingerprints(expected, found)
    wrong = [deviation for deviation in deviations if not deviation.is_same]
    if wrong:
        more = f" (and {len(wrong) - 1} more of {len(deviations)} outputs)" if wrong[1:] else ""
        raise UserError(f"{_describe_deviation(wrong[0])}{more}")
    largest = max(one.largest / one.tolerance for one in deviations)
    return f"ok, {100 * largest:.2g} % of tolerance"


def _describe_deviation(deviation: Deviation) -> str:
    if deviation.note:
        return f"output '{deviation.output}': {deviation.note}"
    return (
        f"output '{deviation.output}' differs by {deviation.largest:.3g} from the fingerprint, "
        f"where {deviation.tolerance:.3g} is tolerated"
    )

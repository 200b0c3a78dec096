# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The weights in the repository are those that the index means, and today's code gives as then."""

import pytest

from qbheat_det.model_zoo import ZooEntry, load_index
from qbheat_det.model_zoo.add import MAX_SHIPPED
from qbheat_det.model_zoo.sources import SHIPPED
from qbheat_det.model_zoo.verify import verify_entry

ENTRIES = [entry for entry in load_index() if entry.distribution is None]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_shipped_entry_is_verified_on_this_machine(
    entry: ZooEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QBHEAT_ZOO", raising=False)
    assert (SHIPPED / entry.stored.file).is_file()
    assert verify_entry(entry)["error"] == ""


def test_every_shipped_file_is_an_entrys_and_all_together_are_small() -> None:
    files = {path.name: path.stat().st_size for path in SHIPPED.iterdir()}
    stored = [entry.stored for entry in ENTRIES]
    assert files == {entry.file: entry.size for entry in stored}
    assert sum(files.values()) <= MAX_SHIPPED

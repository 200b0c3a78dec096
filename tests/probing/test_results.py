# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures of probes in a file: after each row all of them, gone on with under the same setting."""

import json
import math
from pathlib import Path

import pytest

from qbheat_det.checkpoint import WeightsInfo
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.probing.backbones import count_images_seen
from qbheat_det.probing.results import ProbeResults, ProbeRow

_SETTING = {"feature": "s16", "knn": {"k": 20}, "grid": (1.0, 0.1)}


def make_row(
    backbone: str = "a.pth", *, digest: str = "0", probe: str = "knn", recalibrated: int = 0
) -> ProbeRow:
    scores = {"top1": 12.5, "top1_standard_error": 1.0, "top5": 30.0, "top5_standard_error": 1.5}
    chosen = {"trials": {"1": 3.0}}
    return ProbeRow(
        backbone, digest, None, recalibrated, probe, **scores, num_images=8, seconds=0.1,
        chosen=chosen,
    )  # fmt: skip


def test_rows_are_in_the_file_at_once_and_found_again(tmp_path: Path) -> None:
    file = tmp_path / "out" / "probes.json"
    figures = ProbeResults(_SETTING, file)
    rows = [make_row(), make_row(probe="linear"), make_row(recalibrated=4), make_row("b.pth")]
    for number, row in enumerate(rows, 1):
        figures.add(row)
        assert len(json.loads(file.read_text())["rows"]) == number
    again = ProbeResults(_SETTING, file)
    assert again.rows == rows
    assert again.find(rows[2].key) == rows[2]
    assert again.find(make_row(recalibrated=5).key) == rows[2]
    assert again.find(make_row(probe="tran-1").key) is None
    assert again.to_dict() == figures.to_dict()


def test_changed_weights_replace_their_rows_and_nan_is_null(tmp_path: Path) -> None:
    file = tmp_path / "probes.json"
    results = ProbeResults(_SETTING, file)
    results.add(make_row())
    changed = ProbeRow(**{**vars(make_row(digest="1")), "top1": math.nan})
    assert results.find(changed.key) is None
    results.add(changed)
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["digest"], row["top1"]) == ("1", None)
    with pytest.raises(UserError, match=r"\(knn, size\)"):
        ProbeResults({**_SETTING, "knn": {"k": 3}, "size": 64}, file)


@pytest.mark.parametrize("text", ["no json", "[]", '{"rows": []}', '{"setting": 1, "rows": [3]}'])
def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path, text: str) -> None:
    file = tmp_path / "probes.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"probes\.json"):
        ProbeResults(_SETTING, file)
    assert file.read_text() == text


def test_images_seen_are_those_of_all_steps_that_went_into_the_weights() -> None:
    cfg = get_cfg()
    cfg.SOLVER.IMS_PER_BATCH = 64
    info = WeightsInfo.from_config(cfg, iteration=186, commit="")
    assert count_images_seen(info) == 187 * 64
    assert count_images_seen(None) is None
    assert count_images_seen(WeightsInfo()) is None
    assert count_images_seen(WeightsInfo(config="NO_KEY: 1")) is None

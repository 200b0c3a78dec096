# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of loaders beside the steps that they feed."""

from benchmarks.data_path import KINDS, run
from qbheat_det.config import get_config_path, load_config


def test_a_quick_run_measures_both_sides_of_each_kind() -> None:
    rows = run(quick=True, threads=1)
    assert [row.name for row in rows] == [
        "data_path/boxes_detr_vs_step",
        "data_path/cached_features_vs_step",
    ]
    for row in rows:
        assert row.ours > 0
        assert row.peer > 0
        assert row.ratio == row.ours / row.peer


def test_every_kind_has_its_recipe() -> None:
    for case, _ in KINDS.values():
        load_config(get_config_path(case.config))

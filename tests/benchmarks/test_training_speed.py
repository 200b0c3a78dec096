# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Steps before and after: fair turns, processes of two trees, sentences where one cannot be had."""

from typing import Any

import pytest

from benchmarks import training_speed
from benchmarks.training_speed import (
    Turns,
    take_turns,
)


def test_contenders_take_turns_and_each_goes_first_as_often() -> None:
    order: list[str] = []

    def worker(name: str, seconds: float) -> Any:
        def call(steps: int) -> dict[str, Any]:
            order.append(f"{name}{steps}")
            return {"seconds": seconds, "loss": float(len(order)), "peak": 100.0}

        return call

    turns = take_turns({"before": worker("b", 4.0), "after": worker("a", 2.0)}, rounds=2, warm_up=1)
    assert order == ["b1", "b1", "a1", "a1", "a1", "b1", "b1", "a1"]
    assert turns == {
        "before": Turns([0.25, 0.25], 1.0, 100.0),
        "after": Turns([0.5, 0.5], 3.0, 100.0),
    }


@pytest.mark.slow
def test_a_quick_run_measures_both_trees() -> None:
    rows = training_speed.run(quick=True, cases=["mf_detr_285m_211"], threads=1)
    assert [row.name for row in rows] == ["training_speed/mf_detr_285m_211_after_vs_before"]

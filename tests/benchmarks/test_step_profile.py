# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Where a step's time goes: kinds of operators, medians of turns, rows."""

import pytest
from torch.testing import assert_close

from benchmarks.step_profile import (
    KINDS,
    REST,
    kind_of,
    rows_of,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mkldnn_convolution", "convolutions and matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::native_batch_norm_backward", "norms"),
        ("_TwoSlopesBackward", "activations"),
        ("aten::_fused_adamw_", "optimizer and clipping"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "images"),
        ("aten::mul", REST),
        ("aten::mm_unheard_of", REST),
    ],
)
def test_operators_have_the_kind_that_their_name_says(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_job_has_a_row_for_each_kind_it_meets_and_one_for_their_sum() -> None:
    nothing = dict.fromkeys([*KINDS, REST], 0.0)
    before = {**nothing, "attention": 0.3, REST: 0.1}
    rows = {
        row.name: row
        for row in rows_of("mf", {"before": before, "after": {**before, "attention": 0.1}})
    }
    assert set(rows) == {"step_profile/mf: attention", f"step_profile/mf: {REST}",
                         "step_profile/mf: sum"}  # fmt: skip
    assert_close(rows["step_profile/mf: attention"].ratio, 3.0)
    assert_close(rows["step_profile/mf: sum"].ours, 200.0)

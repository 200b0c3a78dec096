# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What training-only help costs: rows for every kind, and the arithmetic of further queries."""

import torch

from benchmarks.training_help import KINDS, PLAIN, build_head, count_decoder, num_extra, run


def test_each_kind_has_a_row_of_multiply_adds_and_one_of_seconds() -> None:
    rows = run(quick=True, threads=1)
    assert [(row.name.split(", ")[1], row.unit) for row in rows] == [
        (kind, unit) for unit in ("GMAdds", "s") for kind in (PLAIN, "denoising and groups")
    ]
    assert rows[0].ratio == rows[2].ratio == 1
    assert rows[1].ours > rows[1].peer == rows[0].ours
    assert all(row.ours > 0 and row.peer > 0 for row in rows)


def test_further_queries_cost_what_the_blocks_do_with_them() -> None:
    # Of 8 boxes: 5 groups with negatives are 80 queries, 2 further groups 200. A query costs a
    # block 8 products with C x C, 2 with C x F, and 2 C for each position or query it looks at.
    width, hidden, own = 256, 1024, 100
    for kind, extra in (("5 denoising groups", 80), ("3 groups of queries", 200)):
        model = build_head(KINDS[kind])
        assert num_extra(model) == extra
        features = [torch.zeros(1, 48, 8, 8), torch.zeros(1, 720, 4, 4)]
        found = count_decoder(model.decoder, features, extra)
        plain = count_decoder(model.decoder, features, 0)
        expected = sum(
            extra * (8 * width**2 + 2 * width * hidden + 2 * width * positions)
            + 2 * width * ((own + extra) ** 2 - own**2)
            for positions in (4, 4, 16, 64)
        )
        assert found - plain == expected

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One vector for an image, with a token beside it where there is one."""

import torch
from detectron2.layers import ShapeSpec

from qbheat_det.modeling.pretrain import pool_features, pooled_width


def test_the_mean_over_the_map_comes_first_and_the_first_token_behind_it() -> None:
    maps, tokens = torch.rand(2, 5, 3, 4), torch.rand(2, 6, 7)
    expected = torch.stack([torch.stack([maps[n, c].mean() for c in range(5)]) for n in range(2)])
    shapes = {"map": ShapeSpec(channels=5, stride=16)}
    torch.testing.assert_close(pool_features({"map": maps}, "map"), expected)
    assert pooled_width(shapes, "map") == 5
    both = pool_features({"map": maps, "tokens": tokens}, "map")
    torch.testing.assert_close(both, torch.cat([expected, tokens[:, 0]], dim=1))
    assert pooled_width({**shapes, "tokens": ShapeSpec(channels=7)}, "map") == 12

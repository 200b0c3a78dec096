# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One vector for an image, with a token beside it where there is one."""

import torch
from detectron2.layers import ShapeSpec

from qbheat_det.layers import PooledFeatures

SHAPES = {"map": ShapeSpec(channels=5, stride=16), "other": ShapeSpec(channels=3, stride=8)}
WITH_TOKENS = {**SHAPES, "tokens": ShapeSpec(channels=7)}


def test_the_mean_over_the_map_comes_first_and_the_first_token_behind_it() -> None:
    maps, tokens = torch.rand(2, 5, 3, 4), torch.rand(2, 6, 7)
    expected = torch.stack([torch.stack([maps[n, c].mean() for c in range(5)]) for n in range(2)])
    pool = PooledFeatures(input_shape=SHAPES, in_feature="map")
    torch.testing.assert_close(pool({"map": maps}), expected)
    assert (pool.width, pool.token_dim, pool.in_features) == (5, 0, ["map"])
    # What was not there when it was built is not read.
    torch.testing.assert_close(pool({"map": maps, "tokens": tokens}), expected)

    pool = PooledFeatures(input_shape=WITH_TOKENS, in_feature="map")
    both = pool({"map": maps, "tokens": tokens})
    torch.testing.assert_close(both, torch.cat([expected, tokens[:, 0]], dim=1))
    assert (pool.width, pool.token_dim, pool.in_features) == (12, 7, ["map", "tokens"])
    assert not pool.state_dict()

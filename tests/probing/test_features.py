# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Features that are kept are those of the backbone, image by image, within the memory allowed."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.probing.features import cache_features, split_by_class


def make_batches(*sizes: int) -> list[list[dict[str, Any]]]:
    numbers = itertools.count()
    return [[{"label": i % 3, "number": i} for i in itertools.islice(numbers, n)] for n in sizes]


def describe(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    numbers = torch.tensor([float(entry["number"]) for entry in batch])
    maps = numbers[:, None, None, None] + torch.arange(24.0).view(2, 3, 4) / 7
    return {"s16": maps, "tokens": numbers[:, None, None] * torch.ones(5, 6)}


def test_maps_means_tokens_and_labels_follow_the_images() -> None:
    found = cache_features(
        describe, make_batches(2, 3, 1), num_images=9, feature="s16", keep_maps=True
    )
    outputs = describe(make_batches(6)[0])
    assert found.maps is not None
    assert found.maps.dtype is torch.float16
    torch.testing.assert_close(found.maps, outputs["s16"].half())
    torch.testing.assert_close(found.pooled, outputs["s16"].mean(dim=(2, 3)))
    torch.testing.assert_close(found.tokens, outputs["tokens"])
    assert found.labels.tolist() == [0, 1, 2, 0, 1, 2]
    torch.testing.assert_close(
        found.joined, torch.cat([outputs["s16"].mean(dim=(2, 3)), outputs["tokens"][:, 0]], dim=1)
    )


def test_maps_beyond_float16_are_clipped_to_its_range() -> None:
    def large(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        maps = describe(batch)["s16"]
        return {"s16": torch.where(maps >= 3, maps * 1e5, maps)}

    found = cache_features(large, make_batches(2, 3), num_images=5, feature="s16", keep_maps=True)
    expected = torch.cat([large(batch)["s16"] for batch in make_batches(2, 3)])
    assert found.maps is not None
    torch.testing.assert_close(found.maps.float(), expected.clamp(max=65504), rtol=1e-3, atol=0)


def test_maps_beyond_the_memory_are_refused_before_they_are_made() -> None:
    arguments = {"num_images": 2_000_000, "feature": "s16", "memory_gb": 0.05}
    with pytest.raises(UserError, match="--memory-gb"):
        cache_features(describe, make_batches(2), keep_maps=True, **arguments)
    found = cache_features(
        lambda batch: {"s16": describe(batch)["s16"]}, make_batches(2), **arguments
    )
    assert found.maps is None
    assert found.tokens is None
    assert found.joined is found.pooled


def test_each_class_is_divided_in_the_same_proportion_by_the_seed() -> None:
    labels = torch.tensor([0] * 10 + [1] * 20 + [2] * 3 + [3] * 2 + [4])[torch.randperm(36)]
    remain, aside = split_by_class(labels)
    assert sorted([*remain.tolist(), *aside.tolist()]) == list(range(36))
    # 2 of 10, 4 of 20, 0.6 of 3 rounded, at least 1 of 2; the only image of a class stays.
    assert labels[aside].bincount(minlength=5).tolist() == [2, 4, 1, 1, 0]
    assert torch.equal(remain, remain.sort().values)
    assert torch.equal(aside, split_by_class(labels)[1])
    assert not torch.equal(aside, split_by_class(labels, seed=1)[1])

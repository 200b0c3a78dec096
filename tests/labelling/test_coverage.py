# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The choice of images by coverage, beside naive implementations of the same papers."""

import itertools
import math

import pytest
import torch

from qbheat_det.labelling import coverage


def make_pool(sizes, *, spread=0.05, seed=0):
    """Returns unit vectors in clusters of some sizes, and their clusters."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.nn.functional.normalize(torch.randn(len(sizes), 16, generator=generator), dim=1)
    clusters = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    noise = spread * torch.randn(len(clusters), 16, generator=generator)
    return torch.nn.functional.normalize(centres[clusters] + noise, dim=1), clusters


def test_k_center_is_the_greedy_farthest_point():
    vectors, _ = make_pool([5, 9, 3], spread=0.5)
    chosen = coverage.k_center(vectors, 6, labelled=[2])
    have = [2]
    for index in chosen:
        distances = [min(float((vector - vectors[j]).norm()) for j in have) for vector in vectors]
        assert distances[index] == pytest.approx(max(distances), abs=1e-5)
        have.append(index)


@pytest.mark.parametrize("strategy", coverage.COVERING)
def test_choices_are_new_distinct_and_within_the_pool(strategy):
    vectors, _ = make_pool([6, 3])
    for budget, taken in itertools.product((1, 4, 20), ([], [0, 8])):
        chosen = coverage.cover(strategy, vectors, budget, taken)
        assert len(chosen) == len(set(chosen)) == min(budget, 9 - len(taken))
        assert not set(chosen) & set(taken)


def test_near_duplicates_are_named_by_the_first_image_of_a_connected_group(monkeypatch):
    angles = torch.rand(40, generator=torch.Generator().manual_seed(0)) * 6.28
    vectors = torch.stack([angles.cos(), angles.sin()], dim=1)
    near = vectors @ vectors.T >= 0.99
    expected = torch.arange(40)
    for _ in range(40):  # each image takes the smallest number of those beside it
        expected = torch.where(near, expected, 40).amin(1)
    assert 5 < len(expected.unique()) < 30
    for block in (40, 40 * 7, 2**24):
        monkeypatch.setattr(coverage, "_BLOCK", block)
        found = coverage.find_duplicates(vectors, vectors, cosine=0.99)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("strategy", coverage.COVERING)
def test_choices_do_not_depend_on_the_blocks(strategy, monkeypatch):
    vectors, _ = make_pool([30, 20, 9, 3], spread=0.15)
    expected = coverage.cover(strategy, vectors, 9, [3, 40])
    monkeypatch.setattr(coverage, "_BLOCK", 100)
    assert coverage.cover(strategy, vectors, 9, [3, 40]) == expected


def test_balanced_images_are_the_greedy_maximum_and_the_rest_is_covered():
    vectors, _ = make_pool([4, 4, 4])
    counts = torch.zeros(12, 3, dtype=torch.float64)
    counts[:5] = torch.tensor([[9, 0, 0], [9, 1, 0], [0, 0, 2], [5, 1, 0], [0, 2, 2]])
    chosen = coverage.choose_balanced(vectors, counts, 9, labelled=[0])
    have = [0]

    def value(rows):
        return math.fsum(math.log1p(n) for n in counts[rows].sum(0).tolist())

    for index in chosen[:4]:
        values = {i: value([*have, i]) for i in range(12) if i not in have}
        assert index == max(values, key=values.__getitem__)
        have.append(index)
    assert chosen[0] == 4  # two rare classes before nine objects of a common one
    assert chosen[4:] == coverage.k_center(vectors, 5, have)  # the others have no objects
    nothing = coverage.choose_balanced(vectors, counts[:, :0], 3, [1])
    assert nothing == coverage.k_center(vectors, 3, [1])


def test_few_images_with_many_features_are_projected():
    coarse = torch.rand(6, 720, generator=torch.Generator().manual_seed(0)) * torch.rand(720) ** 8
    vectors = coverage.unit_vectors(coarse)
    assert vectors.shape == (6, 128)
    assert vectors.isfinite().all()


def test_projection_keeps_distances():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 120, generator=generator)
    wide = features @ torch.linalg.qr(torch.randn(140, 140, generator=generator))[0][:120]
    narrow, projected = coverage.unit_vectors(features), coverage.unit_vectors(wide)
    assert projected.shape == (300, 128)
    torch.testing.assert_close(narrow @ narrow.T, projected @ projected.T, atol=1e-4, rtol=0)


def test_images_that_equal_the_mean_repeat_each_other():
    features = torch.rand(5, 140, generator=torch.Generator().manual_seed(0)) + 1
    for count in (1, 2):  # the same image, once rounded otherwise
        copies = features[:1].repeat(count, 1) * torch.tensor([[1.0], [1.0005]])[:count]
        assert find_repeated(copies) == [0] * count
    assert find_repeated(features) == [*range(5)]


def test_images_of_one_kind_among_others_are_no_copies():
    noise = torch.randn(120, 64, generator=torch.Generator().manual_seed(0))
    noise[1] = noise[0]
    place, spread = torch.tensor([[1.0]] * 40 + [[-4.0]] * 80), [[0.2]] * 40 + [[1.0]] * 80
    features = place + torch.tensor(spread) * noise
    vectors = coverage.unit_vectors(features)[:40]
    assert (vectors @ vectors.T).amin() > 0.98
    assert find_repeated(features) == [0, 0, *range(2, 120)]


def find_repeated(features):
    return coverage.find_duplicates(coverage.unit_vectors(features), features).tolist()

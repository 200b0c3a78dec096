# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Groups of queries: matched and paid for each on its own, unseen by all others."""

import pytest
import torch
from torch.testing import assert_close

from qbheat_det.modeling.detr import QueryGroups, Targets
from qbheat_det.modeling.detr.query_set import QuerySet, join_queries

from .test_criterion import COUNTS, criterion
from .test_decoder_against_reference import maps, small_decoder
from .test_matcher import ground_truth, predictions


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_losses_are_the_sum_over_groups_of_what_each_costs_alone(counts: list[int]) -> None:
    logits, boxes = predictions(2, len(counts), 18, classes=4)
    targets, loss = Targets.stack(*ground_truth(counts, classes=4)), criterion(4)
    groups = QueryGroups(num_groups=3, num_queries=6, dim=8, weight=0.5)
    normalizers = loss.mean_normalizers(torch.tensor(loss.normalizers(counts, 6)), 1)
    found = groups.losses(logits, boxes, targets, loss, normalizers)
    expected = dict.fromkeys(found, torch.zeros(()))
    for group in range(3):
        own = slice(6 * group, 6 * group + 6)
        outputs = {"pred_logits": logits[:, :, own], "pred_boxes": boxes[:, :, own]}
        for name, value in loss(outputs, targets).items():
            name = name.removesuffix("_0").replace("loss_", "loss_group_")
            expected[name] = expected[name] + 0.5 * value
    assert set(found) == {"loss_group_ce", "loss_group_bbox", "loss_group_giou"}
    for name, value in found.items():
        assert_close(value, expected[name], msg=name)


def test_a_query_is_moved_by_those_that_it_sees_and_by_no_other() -> None:
    """Derivatives through all blocks, beside what the masks allow in any number of steps."""
    decoder, queries = small_decoder((1, 1, 1)), 9
    torch.manual_seed(0)
    hidden = torch.tensor([[False, True, False], [True, False, False], [True, True, False]])
    other = QuerySet(
        content=torch.randn(2, 3, 64).double(),
        position=torch.randn(2, 3, 64).double(),
        masked=torch.stack([hidden, torch.ones(3, 3, dtype=torch.bool)]),
        reads_own=torch.tensor([True, False, True]),
    )
    other.masked[1, 1, 1] = False  # who sees neither the own nor another sees itself
    groups = QueryGroups(num_groups=2, num_queries=3, dim=64).double()
    extra = join_queries([groups(2), other])
    features = [torch.stack([f, f.flip(-1)]) for f in maps((12, 20), (24, 40))]
    content = extra.content.clone().requires_grad_()
    moved = QuerySet(content, extra.position, extra.masked, extra.reads_own)
    states = decoder.refine_queries(features, extra=moved)[-1]
    alone = decoder.refine_queries(features)[-1]
    assert_close(states[:, :queries], alone, rtol=1e-10, atol=1e-10)
    group_mask = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool()
    for image in range(2):
        sees = torch.block_diag(group_mask, ~other.masked[image]) | torch.eye(9).bool()
        reached = torch.linalg.matrix_power(sees.double(), 3) > 0  # in three blocks
        for number in range(9):
            (gradient,) = torch.autograd.grad(
                states[image, queries + number].sum(), content, retain_graph=True
            )
            influence = gradient.abs().sum(dim=2) > 0  # (N, E)
            assert not influence[1 - image].any()
            assert_close(influence[image], reached[number])
    (gradient,) = torch.autograd.grad(states[:, :queries].sum(), content)
    assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=0)

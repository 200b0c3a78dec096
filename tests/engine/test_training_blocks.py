# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Blocks of a model, and MODEL.ACTIVATION_CHECKPOINTING: the same numbers from less memory."""

import copy
from typing import Any

import pytest
import torch
from detectron2.modeling import build_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qbheat_det.config import get_cfg
from qbheat_det.engine.training_blocks import call_of, checkpoint_blocks, find_blocks
from tests.engine.test_step import FAST_WITHOUT_NOISE, mf_detr, scenes

OPTS = {
    "backbone": ("MODEL.BACKBONE.FREEZE_AT", 0, "MODEL.MOBILE_FORMER.DROP_PATH", 0.3),
    "head": ("MODEL.MF_DETR.DROPOUT", 0.3, "MODEL.MF_DETR.NORM", "BN"),
}
EVERYTHING_RANDOM = (*OPTS["backbone"], *OPTS["head"], *FAST_WITHOUT_NOISE)


def qb_heat() -> nn.Module:
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.META_ARCHITECTURE = "QBHeat"
    cfg.MODEL.BACKBONE.NAME = "MobileFormer"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    former = cfg.MODEL.MOBILE_FORMER
    former.VARIANT, former.NUM_TOKENS, former.TOKEN_DIM, former.STEM_CHANNELS = "custom", 2, 16, 4
    former.BLOCKS = [["lite", 8, 4, 0], *[["down", 16, 8, 16]] * 3]
    former.EXPANDED_CHANNELS, former.OUT_FEATURES = 16, ["s16_expanded"]
    head = cfg.MODEL.QB_HEAT
    head.FEATURE_DIM, head.DECODER_DIM, head.DECODER_DEPTH, head.DECODER_HEADS = 16, 16, 2, 2
    cfg.INPUT.PRETRAIN.SIZE = 64
    torch.manual_seed(0)
    return build_model(cfg)


def take_step(model: nn.Module, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Returns losses, gradients and buffers of a step, and the next random number."""
    torch.manual_seed(7)
    model.zero_grad()
    losses = model(batch)
    drawn = torch.rand(1)
    torch.stack(list(losses.values())).sum().backward()
    gradients = {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) > 40
    return {**losses, **gradients, **dict(model.named_buffers()), "drawn": drawn}


@pytest.mark.parametrize("case", ["MF-DETR", "MF-DETR, sizes differ", "QB-Heat"])
def test_checkpointed_blocks_give_the_same_bits_and_move_statistics_once(case: str) -> None:
    model = qb_heat() if case == "QB-Heat" else mf_detr(*EVERYTHING_RANDOM)
    batch = scenes((1, 3, 0))
    if "differ" in case:
        batch[1]["image"] = batch[1]["image"][:, :48]
        batch[1]["instances"]._image_size = (48, 64)
    plain = copy.deepcopy(model).train()
    assert checkpoint_blocks(model.train()) >= 6
    for _ in range(2):
        found, expected = take_step(model, batch), take_step(plain, batch)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert int(expected["backbone.stem.norm.num_batches_tracked"]) == 2


def test_recomputing_as_it_is_would_move_statistics_twice() -> None:
    norm = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)).train()
    checkpoint(norm, torch.ones(2, 1, 3, 3), use_reentrant=False).sum().backward()
    assert int(norm[1].num_batches_tracked) == 2  # what the test above would see


def test_only_what_enters_a_block_is_kept() -> None:
    def kept(model: nn.Module) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(scenes((1, 3)))
        return sum(sizes.values())

    model = mf_detr(*EVERYTHING_RANDOM).train()
    before = kept(model)
    checkpoint_blocks(model)
    assert kept(model) < 0.5 * before


def test_names_weights_copies_and_evaluation_are_as_without() -> None:
    model = mf_detr(*EVERYTHING_RANDOM)
    plain = copy.deepcopy(model).eval()
    checkpoint_blocks(model)
    call = call_of(model.backbone.stages[0][0])
    call.compiled = lambda *_: pytest.fail("evaluation runs the block itself")
    assert list(model.state_dict()) == list(plain.state_dict())
    (found,), (expected,) = model.eval()(scenes((1,))), plain(scenes((1,)))
    torch.testing.assert_close(found["instances"].scores, expected["instances"].scores)
    copied = copy.deepcopy(model)
    assert all(block._compiled_call_impl is None for block in find_blocks(copied).values())


def test_blocks_are_members_of_lists_that_have_parts_and_the_outermost_of_them() -> None:
    inner = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.ModuleList([nn.Linear(1, 1)]))
    block = nn.Module()
    block.parts = nn.ModuleList([nn.MultiheadAttention(2, 1)])
    model = nn.Module()
    model.stages = nn.ModuleList([nn.ModuleList([block]), nn.Linear(1, 1)])
    model.alone = nn.MultiheadAttention(2, 1)
    model.inner = inner
    assert find_blocks(model) == {"stages.0.0": block}

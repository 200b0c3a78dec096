# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Checkpointed blocks: the same numbers in other ways."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qbheat_det.config import get_cfg
from qbheat_det.engine import block_modes
from qbheat_det.engine.block_modes import apply_step_keys, checkpoint_blocks, find_blocks

from .gradient_cases import FAST_WITHOUT_NOISE, MF_DETR, Case, build_case, make_image

EVERYTHING_RANDOM = Case(
    MF_DETR,
    opts=(
        *("MODEL.MOBILE_FORMER.DROP_PATH", 0.3, "MODEL.MF_DETR.DROPOUT", 0.3),
        *("MODEL.MF_DETR.NORM", "BN", *FAST_WITHOUT_NOISE),
    ),
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def take_step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Returns losses, gradients and buffers of a step, and the next random number."""
    torch.manual_seed(7)
    model.zero_grad()
    outputs = model(batch)
    losses = outputs if isinstance(outputs, dict) else {"y": outputs.square().mean()}
    drawn = torch.rand(1)
    torch.stack(list(losses.values())).sum().backward()
    gradients = {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients
    return {**losses, **gradients, **dict(model.named_buffers()), "drawn": drawn}


def test_checkpointed_blocks_give_the_same_bits_and_move_statistics_once() -> None:
    model = build_case(EVERYTHING_RANDOM)
    batch = [make_image(index) for index in (1, 0, 5)]
    batch[1]["image"] = batch[1]["image"][:, :48]
    batch[1]["instances"]._image_size = (48, 64)
    plain = copy.deepcopy(model).train()
    checkpoint_blocks(model.train())
    assert len(find_blocks(model)) >= 6
    for _ in range(2):
        found, expected = take_step(model, batch), take_step(plain, batch)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert int(expected["backbone.stem.norm.num_batches_tracked"]) == 2


def test_only_the_inputs_of_a_block_are_stored() -> None:
    def count_stored(model: nn.Module) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model([make_image(1), make_image(0)])
        return sum(sizes.values())

    model = build_case(EVERYTHING_RANDOM).train()
    before = count_stored(model)
    cfg = get_cfg()
    cfg.MODEL.ACTIVATION_CHECKPOINTING = True
    apply_step_keys(cfg, model)
    assert count_stored(model) < 0.5 * before


def test_names_copies_and_evaluation_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers()
    plain = copy.deepcopy(model).eval()
    monkeypatch.setattr(
        block_modes, "checkpoint", lambda *_, **__: pytest.fail("the block itself runs")
    )
    checkpoint_blocks(model)
    x = torch.randn(2, 16)
    assert list(model.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(model.eval()(x), plain(x), rtol=0, atol=0)
    copied = copy.deepcopy(model)
    assert all(block._compiled_call_impl is None for block in find_blocks(copied).values())


def test_blocks_are_the_outermost_members_of_lists_with_children() -> None:
    block = nn.Module()
    block.parts = nn.ModuleList([nn.MultiheadAttention(2, 1)])
    model = nn.Module()
    model.stages = nn.ModuleList([nn.ModuleList([block]), nn.Linear(1, 1)])
    model.alone = nn.MultiheadAttention(2, 1)
    model.inner = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.ModuleList([nn.Linear(1, 1)]))
    assert find_blocks(model) == {"stages.0.0": block}


def test_slow_depthwise_convolutions_train_in_float32_under_autocast() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.Conv2d(8, 8, 3, groups=8))
    model = copy.deepcopy(plain)
    block_modes.run_depthwise_in_float32(model)
    assert [layer._compiled_call_impl is not None for layer in model] == [True, False]
    x = torch.randn(2, 8, 9, 9)
    assert torch.equal(model(x), plain(x))
    seen = []
    model[0].register_forward_hook(lambda layer, inputs, y: seen.append(y.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model[0](x)
    y.sum().backward()  # a gradient of ones, without rounding
    plain[0](x).sum().backward()
    assert y.dtype == torch.bfloat16
    assert seen == [torch.float32]
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)

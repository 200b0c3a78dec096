# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The precision of steps on processors without bfloat16, and of slow convolutions."""

import copy

import pytest
import torch
from torch import nn

from qbheat_det.config import get_cfg
from qbheat_det.core import environment
from qbheat_det.engine import precision
from qbheat_det.engine.precision import choose_precision, run_depthwise_in_float32


@pytest.mark.parametrize(
    ("flags", "dtype"), [({"avx2"}, None), ({"avx2", "amx_bf16"}, torch.float16)]
)
def test_a_processor_that_emulates_half_precision_trains_in_float32(
    flags: set[str],
    dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(environment, "read_cpu_flags", lambda: flags)
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "SOLVER.AMP.ENABLED", True])
    with caplog.at_level("WARNING", logger=precision.__name__):
        assert choose_precision(cfg) == dtype
    assert ("SOLVER.AMP" in caplog.text) == (dtype is None)


def test_slow_depthwise_convolutions_train_in_float32_under_autocast() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.Conv2d(8, 8, 3, groups=8))
    model = copy.deepcopy(plain)
    run_depthwise_in_float32(model)
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

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of the machine's share: what is counted, and against what."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import machine
from benchmarks.detectors import DETECTORS
from benchmarks.machine import count, rows_of, yardsticks
from benchmarks.timing import Sample


def test_a_share_is_of_the_product_and_of_the_best_convolution() -> None:
    rows = {
        row.name: row
        for row in rows_of(
            {
                "285m_211_deploy": 20.0,
                "matmul": 80.0,
                "convolution_3x3_64": 30.0,
                "convolution_3x3_128": 40.0,
            }
        )
    }
    assert rows["machine/285m_211_deploy_vs_matmul"].ratio == 0.25
    assert rows["machine/285m_211_deploy_vs_convolution_3x3"].ratio == 0.5
    assert rows["machine/convolution_3x3_vs_matmul"].ratio == 0.5
    assert len(rows) == 3


def test_products_and_convolutions_are_as_large_as_they_say() -> None:
    for call, madds in yardsticks(quick=True).values():
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == 2 * madds


def test_the_multiply_adds_of_a_peer_are_those_of_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Output:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = self.pred_boxes = logits

    class Peer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 8, 1)

        def forward(self, pixel_values: torch.Tensor) -> Output:
            return Output(self.layer(pixel_values))

    peer = DETECTORS["detr_r50"]
    stub = type(peer)("a peer", lambda: lambda: Peer().eval(), peer.call)
    monkeypatch.setitem(DETECTORS, "detr_r50", stub)
    assert count("detr_r50", 4, 5) == 3 * 8 * 4 * 5


def test_the_rate_is_taken_of_the_fastest_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "set_threads", lambda threads: None)
    monkeypatch.setattr(machine, "count", lambda *_: 4_000_000_000)
    monkeypatch.setattr(machine, "Forwards", lambda *_, **__: _Ready())
    monkeypatch.setattr(
        machine,
        "told_in_rounds",
        lambda calls, rounds: {name: Sample(9.0, 2.0, 10.0) for name in calls},
    )
    rows = {row.name: row for row in machine.run(quick=True)}
    assert rows["machine/285m_211_eager_vs_matmul"].ours == 2.0


class _Ready(contextlib.nullcontext[dict[tuple[str, str], Callable[[], float]]]):
    def __init__(self) -> None:
        super().__init__({("285m_211", "eager"): lambda: 1.0})

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The forms of a detector, and the processes that run them."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from benchmarks.detectors import DETECTORS, Detector, random_images
from benchmarks.forms import COMPILED, EAGER, Forwards, build


@pytest.fixture(autouse=True)
def _forget_what_was_built() -> Iterator[None]:
    build.cache_clear()
    yield
    build.cache_clear()


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> str:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()

    stub = Detector("a peer", lambda: make, lambda model, images: model(images))
    monkeypatch.setitem(DETECTORS, "detr_r50", stub)
    return "detr_r50"


def test_a_compiled_peer_has_its_channels_last_and_the_same_outputs(peer: str) -> None:
    images = random_images(8, 9)
    with torch.inference_mode():
        plain = build(peer, EAGER)(images)
        fast = build(peer, COMPILED, quick=True)(images)
    assert isinstance(fast, torch.Tensor)
    assert fast.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(plain, fast)


@pytest.mark.slow
def test_processes_run_detectors_and_one_that_cannot_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    contenders = [("285m_211", EAGER), ("no detector", EAGER)]
    with Forwards(contenders, 64, 64, threads=1, quick=True) as calls:
        assert list(calls) == contenders[:1]
        assert 0 < calls[contenders[0]]() < 60
    assert "no detector, eager is left out: KeyError: 'no detector'" in capsys.readouterr().out

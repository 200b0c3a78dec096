# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The cosines of tokens: by hand, in a run's metrics, and the warning of their collapse."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from qbheat_det.engine.token_monitor import TokenMonitor, mean_cosines

from .tiny_pretraining import make_folder, train
from .tiny_training import state


def test_cosines_are_the_means_over_all_pairs() -> None:
    tokens = torch.randn(4, 3, 5) + 0.5
    (images, count, _), cosine = tokens.shape, nn.CosineSimilarity(dim=0)
    over_images = [
        cosine(tokens[i, m], tokens[j, m])
        for m in range(count)
        for i in range(images)
        for j in range(i)
    ]
    over_tokens = [
        cosine(tokens[i, m], tokens[i, n])
        for i in range(images)
        for m in range(count)
        for n in range(m)
    ]
    expected = torch.stack([torch.stack(over_images).mean(), torch.stack(over_tokens).mean()])
    torch.testing.assert_close(mean_cosines(tokens), expected)
    right_angles = torch.tensor([[[2.0, 0.0], [0.0, 3.0]], [[1.0, 0.0], [1.0, 0.0]]])
    assert mean_cosines(right_angles).tolist() == pytest.approx([0.5, 0.5])
    assert mean_cosines(tokens[:1]).isnan().tolist() == [True, False]


class Block(nn.Module):
    """Gives a map and the tokens that it is told to."""

    def forward(self, tokens: Tensor) -> tuple[None, Tensor]:
        return None, tokens


def test_a_collapse_that_lasts_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    same, other = torch.ones(3, 2, 4), torch.eye(4)[:3, None].expand(3, 2, 4)
    alive, dead = Block(), Block()
    monitor = TokenMonitor({"alive": alive, "dead": dead}, period=2, warmup=10)
    run: Any = SimpleNamespace(iter=0, max_iter=60, storage=EventStorage(0))
    monitor.trainer = run
    warned: list[int] = []
    for run.iter in range(60):
        run.storage.iter = run.iter
        monitor.before_step()
        dead(same if run.iter != 15 else other)  # not collapsed for a moment, at a reading
        dead(other)  # a second micro-batch
        alive(other)
        monitor.after_step()
        with caplog.at_level(logging.WARNING):
            warned += [run.iter] * (len(caplog.messages) > len(warned))
    # Readings after the warm-up: 11, 13; then 17 and four more.
    assert warned == [25]
    assert "1 of 2 blocks" in caplog.text
    assert "'dead'" in caplog.text
    assert run.storage.history("cosine_over_images/dead").values()[0] == (1.0, 1)
    assert run.storage.history("cosine_over_images/alive").latest() == pytest.approx(0, abs=1e-6)
    assert len(run.storage.history("cosine_over_tokens/alive").values()) == 30
    assert not dead._forward_hooks


def test_a_run_logs_every_block_and_trains_as_without(tmp_path: Path) -> None:
    images = str(make_folder(tmp_path / "images", 6))
    weights = []
    for name, flag in (("with", "True"), ("without", "False")):
        opts = {"SOLVER.LOG_TOKENS": flag, "SOLVER.LOG_PERIOD": "2"}
        train(tmp_path / name, opts, "--images", images)
        weights.append(state(tmp_path / name)["model"])
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    logged = {}
    for name in ("with", "without"):
        lines = map(json.loads, (tmp_path / name / "metrics.json").read_text().splitlines())
        logged[name] = [{k: v for k, v in x.items() if k.startswith("cosine_")} for x in lines]
    assert not any(logged["without"])
    assert len(logged["with"]) == 2
    for scalars in logged["with"]:
        assert {name.partition("/")[0] for name in scalars} == {
            "cosine_over_images",
            "cosine_over_tokens",
        }
        assert all(-1 <= value <= 1.000001 for value in scalars.values())
        assert len(scalars) > 2

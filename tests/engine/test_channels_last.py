# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MODEL.CHANNELS_LAST: another layout of the same numbers."""

from pathlib import Path

import torch

from qbheat_det.engine import Trainer, build_config

from .tiny_training import make_data, parse


def test_the_layout_changes_and_the_outputs_do_not(tmp_path: Path) -> None:
    cfg = build_config(parse(tmp_path / "run", make_data(tmp_path), {}))
    model = Trainer.build_model(cfg).eval()
    cfg.defrost()
    cfg.MODEL.CHANNELS_LAST = True
    other = Trainer.build_model(cfg).eval()
    other.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 64, 64)
    maps, expected = other.backbone(images), model.backbone(images)
    assert all(value.is_contiguous(memory_format=torch.channels_last) for value in maps.values())
    assert not all(
        value.is_contiguous(memory_format=torch.channels_last) for value in expected.values()
    )
    torch.testing.assert_close(maps, expected)

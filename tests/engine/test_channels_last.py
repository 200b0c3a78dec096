# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MODEL.CHANNELS_LAST: another layout of the same numbers."""

from pathlib import Path

import pytest
import torch

from qbheat_det.config import find_memory_format, get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.engine import Trainer, build_config

from .tiny_training import make_data, parse


def test_the_layout_changes_and_the_outputs_do_not(tmp_path: Path) -> None:
    cfg = build_config(parse(tmp_path / "run", make_data(tmp_path), {}))
    cfg.defrost()
    model = Trainer.build_model(cfg).eval()
    cfg.MODEL.CHANNELS_LAST = False
    plain = Trainer.build_model(cfg).eval()
    plain.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 64, 64)
    maps, expected = model.backbone(images), plain.backbone(images)
    assert all(value.is_contiguous(memory_format=torch.channels_last) for value in maps.values())
    assert not all(
        value.is_contiguous(memory_format=torch.channels_last) for value in expected.values()
    )
    torch.testing.assert_close(maps, expected)


def test_the_default_is_the_devices() -> None:
    cfg = get_cfg()
    for device, asked, is_innermost in (
        ("cpu", None, True),
        ("cuda:1", None, False),
        ("cpu", False, False),
        ("cuda", True, True),
    ):
        cfg.MODEL.DEVICE, cfg.MODEL.CHANNELS_LAST = device, asked
        assert (find_memory_format(cfg) == torch.channels_last) == is_innermost
    cfg.MODEL.CHANNELS_LAST = "auto"
    with pytest.raises(UserError, match=r"MODEL\.CHANNELS_LAST"):
        find_memory_format(cfg)

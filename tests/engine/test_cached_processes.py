# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two processes make one cache, and train one head from it."""

from pathlib import Path

import torch

from .cached_cases import train_from_cache
from .processes import make_args, run_in_processes


def test_two_processes_share_one_encoder_one_cache_and_one_head(
    tmp_path: Path, tiny_data: Path
) -> None:
    args = make_args(folder=str(tmp_path), data=str(tiny_data))
    first, second = run_in_processes(train_from_cache, args, tmp_path)
    for part in ("encoder", "head"):
        torch.testing.assert_close(first[part], second[part], rtol=0, atol=0)
    assert first["encoded"] + second["encoded"] == 12 * 8 + 12
    caches = [folder for folder in (tmp_path / "cache").iterdir() if folder.is_dir()]
    assert sorted(len(list(folder.glob("*.safetensors"))) for folder in caches) == [1, 3]

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probes of classes from cached features: tokens, channels innermost, skipped images."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from qbheat_det.engine.data_flags import LABELLED_TRAIN, LABELLED_VAL
from tests.data.pictures import draw
from tests.engine.conftest import forget_runs
from tests.engine.test_classifier_run import start
from tests.engine.tiny_training import losses

VIEWS = {
    "MODEL.CHANNELS_LAST": "True",
    "SOLVER.MAX_ITER": "3",
    "SOLVER.AMP.ENABLED": "False",  # online, the encoder would be in half precision too
    "INPUT.PRETRAIN.MEMORY_GB": "4.0",
}


@pytest.mark.parametrize(("decoder", "count"), [("tran1", 2), ("linear", 1)])
def test_a_probe_from_a_float32_cache_is_the_probe_online_to_the_bit(
    tmp_path: Path, decoder: str, count: int
) -> None:
    folder = tmp_path / "train"
    for seed, name in enumerate(("blue", "green", "red")):
        (folder / name).mkdir(parents=True)
        for index in range(4):  # so large that images kept in memory are scaled down
            pixels = draw(100, 75, seed=4 * seed + index)
            large = Image.fromarray(pixels).resize((1000, 750), Image.Resampling.NEAREST)
            large.save(folder / name / f"{index}.png", compress_level=1)
    (folder / "red" / "broken.png").write_bytes(b"no image")
    cache = {
        "MODEL.CACHE_FEATURES.ENABLED": "True",
        "MODEL.CACHE_FEATURES.DTYPE": "float32",
        "MODEL.CACHE_FEATURES.FOLDER": str(tmp_path / "cache"),
    }
    results: dict[str, Any] = {}
    skipped: dict[str, Any] = {}
    views = {**VIEWS, "INPUT.FIXED_VIEWS.COUNT": str(count)}
    for name, opts in {"online": views, "cached": {**views, **cache}}.items():
        torch.manual_seed(0)
        recipe = f"ImageNet-probing/{decoder}_3.7G.yaml"
        trainer = start(tmp_path / name, recipe, folder, opts, "--val-folder", str(folder))
        results[name] = trainer.train()
        skipped[name] = trainer.data_loader.skipped
    assert losses(tmp_path / "cached") == losses(tmp_path / "online")
    assert results["cached"] == results["online"] != {}
    assert skipped["cached"] == skipped["online"]
    assert ["broken.png" in where for where in skipped["cached"]] == [True]
    forget_runs(LABELLED_TRAIN, LABELLED_VAL)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probes of classes from cached features: tokens, channels innermost, micro-batches, mixing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from qbheat_det.core.errors import UserError
from qbheat_det.engine.data_flags import LABELLED_TRAIN, LABELLED_VAL
from tests.engine.conftest import forget_runs
from tests.engine.test_classifier_run import make_class_folders, start
from tests.engine.tiny_training import losses

VIEWS = {
    "INPUT.FIXED_VIEWS.COUNT": "2",
    "MODEL.CHANNELS_LAST": "True",
    "SOLVER.MAX_ITER": "3",
    "SOLVER.AMP.ENABLED": "False",  # online, the encoder would be in half precision too
}


@pytest.mark.parametrize(("decoder", "count"), [("tran1", 2), ("linear", 1)])
def test_a_probe_from_a_float32_cache_is_the_probe_online_to_the_bit(
    tmp_path: Path, decoder: str, count: int
) -> None:
    folder = make_class_folders(tmp_path / "train")
    for path in folder.rglob("*.png"):  # so large that images kept in memory are scaled down
        with Image.open(path) as image:
            image.resize((1000, 750), Image.Resampling.NEAREST).save(path, compress_level=1)
    (folder / "red" / "broken.png").write_bytes(b"no picture")
    cache = {
        "MODEL.CACHE_FEATURES.ENABLED": "True",
        "MODEL.CACHE_FEATURES.DTYPE": "float32",
        "MODEL.CACHE_FEATURES.FOLDER": str(tmp_path / "cache"),
    }
    results: dict[str, Any] = {}
    faults: dict[str, Any] = {}
    views = {**VIEWS, "INPUT.FIXED_VIEWS.COUNT": str(count), "INPUT.PRETRAIN.MEMORY_GB": "4.0"}
    for name, opts in {"online": views, "cached": {**views, **cache}}.items():
        torch.manual_seed(0)
        recipe = f"ImageNet-probing/{decoder}_3.7G.yaml"
        trainer = start(tmp_path / name, recipe, folder, opts, "--val-folder", str(folder))
        results[name] = trainer.train()
        faults[name] = trainer.data_loader.skipped
    assert losses(tmp_path / "cached") == losses(tmp_path / "online")
    assert results["cached"] == results["online"]
    assert faults["cached"] == faults["online"]
    assert ["broken.png" in where for where in faults["cached"]] == [True]
    assert results["cached"]
    forget_runs(LABELLED_TRAIN, LABELLED_VAL)


def test_mixing_images_is_refused(tmp_path: Path) -> None:
    folder = make_class_folders(tmp_path / "train")
    opts = {**VIEWS, "MODEL.CACHE_FEATURES.ENABLED": "True", "MODEL.CLASSIFIER.CUTMIX": "0.5"}
    with pytest.raises(UserError, match=r"MODEL\.CLASSIFIER\.CUTMIX"):
        start(tmp_path / "run", "ImageNet-probing/tran1_3.7G.yaml", folder, opts)
    forget_runs(LABELLED_TRAIN, LABELLED_VAL)

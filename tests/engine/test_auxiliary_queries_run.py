# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A run with auxiliary queries: what it exports, and that every config loads its weights."""

from pathlib import Path

import torch

from qbheat_det.checkpoint import ExactCheckpointer, read_weights
from qbheat_det.engine import Trainer, build_config
from qbheat_det.modeling.contracts import train_only_modules

from .conftest import forget_runs
from .tiny_training import MF_DETR, make_data, parse, start_run, state

GROUPS = "MODEL.MF_DETR.QUERY_GROUPS.COUNT"
AUXILIARY = {"MODEL.MF_DETR.DENOISING.GROUPS": "2", GROUPS: "2", "SOLVER.MAX_ITER": "1"}


def test_auxiliary_queries_are_resumed_but_not_exported_and_weights_fit_without_them(
    tmp_path: Path,
) -> None:
    data, folder = make_data(tmp_path / "data"), tmp_path / "run"
    forget_runs()
    trainer = start_run(parse(folder, data, {**MF_DETR, **AUXILIARY}))
    trainer.train()
    modules = train_only_modules(trainer.bare_model)
    kept = state(folder)["model"]
    exported, _ = read_weights(str(folder / "model_final.safetensors"))
    missing = {name for name in kept if name.startswith(modules)}
    assert missing == kept.keys() - exported.keys() != set()
    for opts, file in (
        ({}, "model_final.pth"),
        (AUXILIARY, "model_final.pth"),
        ({**AUXILIARY, GROUPS: "4"}, "model_final.safetensors"),
    ):
        forget_runs()
        cfg = build_config(parse(tmp_path / "new", data, {**MF_DETR, **opts}))
        model = Trainer.build_model(cfg)
        ExactCheckpointer(model, class_names=cfg.MODEL.CLASS_NAMES).load(str(folder / file))
        found = dict(model.state_dict())
        expected = kept if opts is AUXILIARY else exported
        shared = {name: found[name] for name in expected}
        torch.testing.assert_close(shared, dict(expected), rtol=0, atol=0)
    forget_runs()

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What one process of several does that train from one cache, for tests."""

import argparse
from pathlib import Path
from typing import Any

import torch

from qbheat_det.engine import Trainer, build_config
from qbheat_det.engine.feature_build import ViewEncoder
from qbheat_det.modeling.backbone import CachedBackbone

from . import tiny_training

FROZEN = {
    "MODEL.BACKBONE.FREEZE_AT": "5",
    "INPUT.FIXED_VIEWS.COUNT": "2",
    "SOLVER.MAX_ITER": "3",
    "SOLVER.CHECKPOINT_PERIOD": "2",
}
MF_DETR = {**tiny_training.MF_DETR, "INPUT.DETR_CROP_RESIZE": "[]"}
ON = {"MODEL.CACHE_FEATURES.ENABLED": "True", "MODEL.CACHE_FEATURES.DTYPE": "float32"}


def train_from_cache(args: argparse.Namespace) -> dict[str, Any]:
    """Trains two steps from a cache that all processes make together.

    Returns:
        How many views this process encoded, a weight of its encoder, and its head's weights.
    """
    encoded = 0
    call = ViewEncoder.__call__

    def counted(self: ViewEncoder, entries: Any) -> Any:
        nonlocal encoded
        encoded += len(entries)
        return call(self, entries)

    ViewEncoder.__call__ = counted  # type: ignore[method-assign]
    folder = Path(args.folder)
    opts = {
        **FROZEN,
        **MF_DETR,
        **ON,
        "MODEL.CACHE_FEATURES.FOLDER": str(folder / "cache"),
        "INPUT.FIXED_VIEWS.COUNT": "4",
        "SOLVER.MAX_ITER": "2",
        "MODEL.DEVICE": "cpu",
    }
    # Each process begins with random weights of its own.
    torch.manual_seed(torch.distributed.get_rank())
    parsed = tiny_training.parse(folder / "run", Path(args.data), opts)
    (folder / "run").mkdir(exist_ok=True)
    trainer = Trainer(build_config(parsed))
    trainer.resume_or_load(resume=False)
    trainer.train()
    backbone = next(m for m in trainer.bare_model.modules() if isinstance(m, CachedBackbone))
    return {
        "encoded": encoded,
        "encoder": {k: v.clone() for k, v in backbone.encoder.state_dict().items()},
        "head": {k: v.detach().clone() for k, v in trainer.bare_model.named_parameters()},
    }

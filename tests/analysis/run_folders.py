# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Folders of finished runs of tiny models: weights, config and log, as training leaves them."""

import json
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model

from qbheat_det.checkpoint import WeightsInfo, save_weights


def write_run(folder: Path, cfg: CfgNode) -> Path:
    """Writes a run with random weights that ended after ten steps."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    info = WeightsInfo.from_config(cfg, iteration=9, commit="")
    save_weights(str(folder / "model_final.safetensors"), build_model(cfg).state_dict(), info)
    (folder / "config.yaml").write_text(cfg.dump(), encoding="utf-8")
    records = [{"iteration": 4, "total_loss": 2.0}, {"iteration": 9}]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (folder / "metrics.json").write_text(lines, encoding="utf-8")
    return folder

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""QB-Heat under the package's trainer, from a shipped recipe: it runs, and resumes to the bit."""

from pathlib import Path

import torch
from detectron2.engine import default_argument_parser

from qbheat_det.config import get_config_path
from qbheat_det.data import register_image_folders
from qbheat_det.engine import Trainer, add_data_flags, build_config, setup
from tests.engine.tiny_training import losses, make_data, state

RECIPE = get_config_path("quick_schedules/qb_heat_285M_toy.yaml")
OPTS = {
    "MODEL.DEVICE": "cpu",
    "MODEL.QB_HEAT.FEATURE_DIM": "16",
    "MODEL.QB_HEAT.DECODER_DEPTH": "1",
    "MODEL.QB_HEAT.DECODER_DIM": "16",
    "INPUT.PRETRAIN.SIZE": "64",
    "SOLVER.IMS_PER_BATCH": "5",
    "SOLVER.ACCUMULATE": "2",
    "SOLVER.MAX_ITER": "4",
    "SOLVER.CHECKPOINT_PERIOD": "2",
    "SOLVER.LOG_PERIOD": "1",
    "SOLVER.BASE_LR": "0.1",  # for 256 images
    "SOLVER.WARMUP_ITERS": "1",
    "DATASETS.TRAIN": "('qb_heat_run',)",
    "SEED": "3",
}


def train(output_dir: Path, *flags: str) -> None:
    parser = default_argument_parser()
    add_data_flags(parser)
    pairs = {**OPTS, "OUTPUT_DIR": str(output_dir)}
    words = [word for pair in pairs.items() for word in pair]
    args = parser.parse_args(["--config-file", RECIPE, *flags, *words])
    cfg = build_config(args)
    setup(cfg, args)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    trainer.train()


def test_a_run_that_was_interrupted_ends_with_the_same_weights(tmp_path: Path) -> None:
    register_image_folders("qb_heat_run", [make_data(tmp_path / "data") / "images"])
    train(tmp_path)
    whole, expected = state(tmp_path)["model"], losses(tmp_path)
    assert sorted(expected) == [0, 1, 2, 3]
    (tmp_path / "model_final.pth").unlink()
    (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
    train(tmp_path, "--resume")
    assert losses(tmp_path) == expected
    resumed = state(tmp_path)["model"]
    halfway = state(tmp_path, "model_0000001")["model"]
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
        assert not (name.startswith("predictor") and torch.equal(halfway[name], tensor)), name

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every config of configs/objectives trains the same encoder end to end, and resumes to the bit.

A new file is tested by being there.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qbheat_det.checkpoint import read_weights
from qbheat_det.config import get_config_path, load_config
from qbheat_det.engine import Trainer, build_config, setup
from qbheat_det.engine.class_folders import LABELLED_TRAIN
from qbheat_det.engine.data_flags import CUSTOM_IMAGES
from tests.data.pictures import draw, save
from tests.engine.conftest import forget_runs
from tests.engine.tiny_pretraining import TINY_ENCODER
from tests.engine.tiny_training import losses, state
from tools.arguments import add_data_flags, add_image_flags, add_training_flags

FOLDER = Path(get_config_path("objectives/Base-Objective.yaml")).parent
OBJECTIVES = sorted(path for path in FOLDER.glob("*.yaml") if not path.name.startswith("Base-"))
OPTS = {
    "MODEL.DEVICE": "cpu",
    **TINY_ENCODER,
    "MODEL.QB_HEAT.FEATURE_DIM": "16",
    "MODEL.QB_HEAT.DECODER_DIM": "16",
    "MODEL.QB_HEAT.DECODER_DEPTH": "1",
    "MODEL.MOCO.HIDDEN_DIM": "16",
    "MODEL.MOCO.DIM": "8",
    "MODEL.MOCO.QUEUE_SIZE": "12",
    "MODEL.MOCO.NORM_GROUPS": "2",
    "MODEL.WASSERSTEIN.HIDDEN_DIM": "16",
    "MODEL.WASSERSTEIN.DIM": "8",
    "MODEL.WASSERSTEIN.CRITIC_DIM": "8",
    "INPUT.PRETRAIN.SIZE": "64",
    "SOLVER.IMS_PER_BATCH": "4",
    "SOLVER.MAX_ITER": "3",
    "SOLVER.WARMUP_ITERS": "1",
    "SOLVER.CHECKPOINT_PERIOD": "2",
    "SOLVER.CHECKPOINTS_KEPT": "2",
    "SOLVER.LOG_PERIOD": "1",
    "SEED": "3",
}


@pytest.fixture(autouse=True)
def _no_runs_before() -> Iterator[None]:
    forget_runs(CUSTOM_IMAGES, LABELLED_TRAIN)
    yield
    forget_runs(CUSTOM_IMAGES, LABELLED_TRAIN)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two class folders of three pictures each."""
    folder = tmp_path_factory.mktemp("pictures")
    for index in range(6):
        path = folder / ("round", "square")[index % 2]
        path.mkdir(exist_ok=True)
        save(path / f"{index}.png", draw(72, 80, seed=index))
    return folder


def train(recipe: Path, pictures: Path, output_dir: Path, *flags: str) -> Trainer:
    """As ``tools/train_net.py`` does, with the flag for pictures that the objective takes."""
    forget_runs(CUSTOM_IMAGES, LABELLED_TRAIN)
    parser = argparse.ArgumentParser()
    add_training_flags(parser)
    add_data_flags(parser)
    add_image_flags(parser)
    labels = load_config(recipe).INPUT.DATASET_MAPPER_NAME == "classify"
    given = ["--train-folder" if labels else "--image-folder", str(pictures)]
    pairs = {**OPTS, "OUTPUT_DIR": str(output_dir)}
    words = [word for pair in pairs.items() for word in pair]
    args = parser.parse_args(["--config-file", str(recipe), *given, *flags, *words])
    cfg = build_config(args)
    setup(cfg, args)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    trainer.train()
    return trainer


def encoder_of(recipe: Path) -> dict[str, object]:
    """Returns what decides the encoder, and how long and on what it learns."""
    cfg = load_config(recipe)
    images = {key: cfg.INPUT.PRETRAIN[key] for key in ("SIZE", "SCALE", "RATIO")}
    # Labels have an evaluation of their own; a momentum copy or a queue is an objective's matter.
    return {
        "backbone": cfg.MODEL.BACKBONE,
        "mobile_former": cfg.MODEL.MOBILE_FORMER,
        "solver": cfg.SOLVER,
        "images": images,
        "flip": cfg.INPUT.RANDOM_FLIP,
    }


def test_objectives_differ_in_nothing_but_the_objective() -> None:
    assert len(OBJECTIVES) >= 7
    first, *others = map(encoder_of, OBJECTIVES)
    assert all(other == first for other in others)


@pytest.mark.parametrize("recipe", OBJECTIVES, ids=lambda path: path.stem)
def test_an_objective_trains_the_encoder_and_resumes_to_the_bit(
    recipe: Path, pictures: Path, tmp_path: Path
) -> None:
    trainer = train(recipe, pictures, tmp_path)
    expected, whole = losses(tmp_path), state(tmp_path)["model"]
    assert sorted(expected) == [0, 1, 2]
    assert all(math.isfinite(loss) for loss in expected.values())
    early = state(tmp_path, "model_0000001")["model"]
    names = [name for name, _ in trainer.bare_model.backbone.named_parameters()]
    moved = [
        name for name in names if not torch.equal(*(m[f"backbone.{name}"] for m in (early, whole)))
    ]
    assert len(moved) > 0.8 * len(names)  # some of a ReLU's are without a gradient

    # The file of weights says what stays behind, and holds the encoder under the keys of all.
    tensors, info = read_weights(str(tmp_path / "model_final.safetensors"))
    assert info is not None
    assert set(info.pretrain_only_modules) == set(trainer.bare_model.pretrain_only_modules)
    assert {name.partition(".")[0] for name in tensors} <= {"backbone", *info.pretrain_only_modules}
    assert {f"backbone.{name}" for name in names} <= set(tensors)

    (tmp_path / "model_final.pth").unlink()
    (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
    train(recipe, pictures, tmp_path, "--resume")
    assert losses(tmp_path) == expected
    resumed = state(tmp_path)["model"]
    assert resumed.keys() == whole.keys()
    different = [name for name, tensor in whole.items() if not torch.equal(resumed[name], tensor)]
    assert different == []

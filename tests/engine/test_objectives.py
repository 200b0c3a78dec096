# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every config of configs/objectives trains the same encoder end to end, and resumes to the bit.

A new file is tested by being there.
"""

import math
from pathlib import Path

import pytest
import timm
import torch

from qbheat_det.checkpoint import WeightsInfo, read_weights, save_weights
from qbheat_det.config import get_config_path, load_config

from .classifier_cases import make_classes
from .tiny_pretraining import OPTS as PRETRAINING_OPTS
from .tiny_training import losses, read_opts, state, train_recipe

FOLDER = Path(get_config_path("objectives/Base-Objective.yaml")).parent
OBJECTIVES = sorted(path for path in FOLDER.glob("*.yaml") if not path.name.startswith("Base-"))
OPTS = {
    **PRETRAINING_OPTS,
    **read_opts("""
MODEL.MOCO.HIDDEN_DIM 16 MODEL.MOCO.DIM 8 MODEL.MOCO.QUEUE_SIZE 12 MODEL.MOCO.NORM_GROUPS 2
MODEL.WASSERSTEIN.HIDDEN_DIM 16 MODEL.WASSERSTEIN.DIM 8 MODEL.WASSERSTEIN.CRITIC_DIM 8
SOLVER.IMS_PER_BATCH 4 SOLVER.ACCUMULATE 1 SOLVER.MAX_ITER 2 SOLVER.CHECKPOINT_PERIOD 1
"""),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Folder of two class folders of three images each."""
    return make_classes(tmp_path_factory.mktemp("images"), {"round": 3, "square": 3})


def train(recipe, images, output_dir, *flags):
    """Trains with the flag that names images for the objective."""
    labels = load_config(recipe).INPUT.DATASET_MAPPER_NAME == "classify"
    flags = (*flags, "--data" if labels else "--images", images)
    # One whose weights in files are averages.
    opts = {**OPTS, "SOLVER.EMA.ENABLED": str(recipe.stem == "qb_heat")}
    if recipe.stem == "distill":
        teacher = Path(images) / "teacher.safetensors"
        if not teacher.exists():
            network = timm.create_model("mobilenetv3_small_050")
            save_weights(str(teacher), network.state_dict(), WeightsInfo())
        opts |= {
            "MODEL.TEACHER.NAME": "mobilenetv3_small_050",
            "MODEL.TEACHER.WEIGHTS": str(teacher),
            "MODEL.TEACHER.IMAGE_SIZE": "128",
            "MODEL.CACHE_FEATURES.FOLDER": str(output_dir / "cache"),
        }
    return train_recipe(str(recipe), output_dir, opts, *flags)


def test_objectives_differ_in_nothing_but_the_objective():
    def get_common_keys(recipe):
        cfg = load_config(recipe)
        crops = [cfg.INPUT.PRETRAIN[key] for key in ("SIZE", "SCALE")]
        encoder = [cfg.MODEL.BACKBONE, cfg.MODEL.MOBILE_FORMER]
        return [*encoder, cfg.SOLVER, *crops, cfg.INPUT.RANDOM_FLIP]

    assert len(OBJECTIVES) >= 7
    first, *others = map(get_common_keys, OBJECTIVES)
    assert all(other == first for other in others)


@pytest.mark.parametrize("recipe", OBJECTIVES, ids=lambda path: path.stem)
def test_an_objective_trains_the_encoder_and_resumes_to_the_bit(recipe, images, tmp_path):
    trainer = train(recipe, images, tmp_path)
    expected, whole = losses(tmp_path), state(tmp_path)["model"]
    assert sorted(expected) == [0, 1]
    assert all(math.isfinite(loss) for loss in expected.values())
    early = state(tmp_path, "model_0000000")["model"]
    names = [f"backbone.{name}" for name, _ in trainer.bare_model.backbone.named_parameters()]
    moved = [name for name in names if not torch.equal(early[name], whole[name])]
    assert len(moved) > 0.8 * len(names)  # some of a ReLU's are without a gradient
    for name in whole:  # MoCo's state besides its weights
        if name == "queue.keys" or name.startswith("momentum_backbone.stem.w"):
            assert not torch.equal(early[name], whole[name]), name

    # The exported weights name what only pre-training needs.
    tensors, info = read_weights(str(tmp_path / "model_final.safetensors"))
    assert set(info.pretrain_only_modules) == set(trainer.bare_model.pretrain_only_modules)
    assert {name.partition(".")[0] for name in tensors} <= {"backbone", *info.pretrain_only_modules}
    assert set(names) <= set(tensors)

    (tmp_path / "model_final.pth").unlink()
    (tmp_path / "last_checkpoint").write_text("model_0000000.pth")
    train(recipe, images, tmp_path, "--resume")
    assert losses(tmp_path) == expected
    torch.testing.assert_close(state(tmp_path)["model"], whole, rtol=0, atol=0)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training on a teacher's features: what is compared with what, and a run that resumes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.data import FixedViews, build_mapper
from qbheat_det.engine import Trainer
from qbheat_det.engine.data_sources import CUSTOM_IMAGES
from qbheat_det.modeling.pretrain.distillation import feature_loss
from tests.data.pictures import draw, save

from .conftest import forget_runs
from .tiny_pretraining import OPTS
from .tiny_training import losses, parse_run, start_run, state

RECIPE = "configs/custom/distill_285M_cpu.yaml"
TEACHER = "mobilenetv3_small_050"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Images, and the weights of a teacher."""
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "images").mkdir()
    for index in range(5):
        save(folder / "images" / f"{index}.png", draw(72, 80, seed=index))
    torch.manual_seed(0)
    weights = timm.create_model(TEACHER).state_dict()
    save_weights(str(folder / "teacher.safetensors"), weights, WeightsInfo())
    yield folder
    forget_runs(CUSTOM_IMAGES)


def build(folder: Path, output_dir: Path, *flags: str, **changes: str) -> Trainer:
    forget_runs(CUSTOM_IMAGES)
    opts = {
        **OPTS,
        "MODEL.TEACHER.NAME": TEACHER,
        "MODEL.TEACHER.WEIGHTS": str(folder / "teacher.safetensors"),
        "MODEL.TEACHER.IMAGE_SIZE": "128",
        "MODEL.CACHE_FEATURES.FOLDER": str(folder / "cache"),
        "MODEL.CACHE_FEATURES.DTYPE": "float32",
        "SOLVER.CHECKPOINTS_KEPT": "3",
        "OUTPUT_DIR": str(output_dir),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    args = parse_run(RECIPE, opts, *flags, "--images", str(folder / "images"))
    return start_run(args)


def check_targets(trainer: Trainer, folder: Path) -> None:
    """Checks each view that the stream may give against the teacher on the same view, larger."""
    cfg = trainer.cfg.clone()
    cfg.defrost()
    small = FixedViews(build_mapper(cfg, is_train=True), count=2)
    cfg.INPUT.PRETRAIN.SIZE = 128
    large = FixedViews(build_mapper(cfg, is_train=True), count=2)
    net = timm.create_model(TEACHER).eval()
    net.load_state_dict(load_file(folder / "teacher.safetensors"))
    for record in trainer.data_loader.dataset:
        allowed = []
        for number in range(2):
            image = large.view(record, number)["image"].float()[None]
            with torch.no_grad():
                maps = net.forward_intermediates((image - 127) / 128, intermediates_only=True)
            pair = small.view(record, number)["image"], maps[-1][0]
            allowed += [pair, tuple(x.flip(-1) for x in pair)]
        for _ in range(6):
            entry = trainer.data_loader.mapper(record)
            assert any(
                torch.equal(entry["image"], image)
                and torch.allclose(entry["target"], target, atol=1e-4)
                for image, target in allowed
            )


@pytest.mark.parametrize("visible", ["whole", "both"])
def test_targets_are_the_teachers_features_of_the_same_views_and_a_run_resumes(
    visible: str, folder: Path, tmp_path: Path
) -> None:
    trainer = build(folder, tmp_path, MODEL__QB_HEAT__VISIBLE=visible)
    trainer.train()
    whole, expected = state(tmp_path)["model"], losses(tmp_path)
    check_targets(trainer, folder)

    (tmp_path / "model_final.pth").unlink()
    (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
    build(folder, tmp_path, "--resume", MODEL__QB_HEAT__VISIBLE=visible).train()
    assert losses(tmp_path) == expected
    torch.testing.assert_close(state(tmp_path)["model"], whole, rtol=0, atol=0)


def test_the_loss_is_that_of_normalised_vectors_by_hand() -> None:
    predicted, target = torch.randn(2, 3, 3, 5), torch.randn(2, 3, 3, 5) * 3 + 1
    total = 0.0
    for image in range(2):
        for row in range(3):
            for column in range(3):
                vector = target[image, row, column].double()
                wanted = (vector - vector.mean()) / (vector.var(unbiased=False) + 1e-5).sqrt()
                for error in (predicted[image, row, column] - wanted).abs().tolist():
                    total += error**2 / 4 if error < 2 else error - 1
    assert feature_loss(predicted, target).item() == pytest.approx(total / 90, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"MODEL__TEACHER__IMAGE_SIZE": "96"}, "MODEL.TEACHER.IMAGE_SIZE"),
        ({"INPUT__FIXED_VIEWS__COUNT": "0"}, "INPUT.FIXED_VIEWS.COUNT"),
    ],
)
def test_a_wrong_key_is_named(
    changes: dict[str, str], key: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=key):
        build(folder, tmp_path, **changes)

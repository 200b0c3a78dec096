# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probing and fine-tuning under the trainer, from shipped recipes: frozen, handed over, resumed."""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from qbheat_det.config import get_config_path
from qbheat_det.engine import Trainer, build_config, setup
from qbheat_det.engine.class_folders import LABELLED_TRAIN, LABELLED_VAL
from tests.engine.conftest import forget_runs
from tests.engine.gradient_cases import BLOCKS
from tests.engine.tiny_training import losses, state
from tools.arguments import add_data_flags, add_image_flags, add_training_flags

PROBE, FINETUNE = "ImageNet-probing/tran1_3.7G.yaml", "ImageNet-finetune/tran1_3.7G.yaml"
OPTS = {
    "MODEL.DEVICE": "cpu",
    "MODEL.MOBILE_FORMER.VARIANT": "custom",
    "MODEL.MOBILE_FORMER.BLOCKS": str(BLOCKS),
    "MODEL.MOBILE_FORMER.STEM_CHANNELS": "8",
    "MODEL.MOBILE_FORMER.TOKEN_DIM": "16",
    "MODEL.MOBILE_FORMER.EXPANDED_CHANNELS": "32",
    "MODEL.CLASSIFIER.WIDTH": "64",
    "INPUT.PRETRAIN.SIZE": "32",
    "DATALOADER.NUM_WORKERS": "0",
    "SOLVER.IMS_PER_BATCH": "8",
    "SOLVER.ACCUMULATE": "2",
    "SOLVER.MAX_ITER": "4",
    "SOLVER.WARMUP_ITERS": "1",
    "SOLVER.BASE_LR": "0.05",  # for 256 images
    "SOLVER.CHECKPOINT_PERIOD": "2",
    "SOLVER.LOG_PERIOD": "1",
    "VIS.ENABLED": "False",
    "SEED": "3",
}
COLOURS = {"blue": (0, 0, 200), "green": (0, 200, 0), "red": (200, 0, 0)}


@pytest.fixture(autouse=True)
def _no_runs_before() -> Iterator[None]:
    forget_runs(LABELLED_TRAIN, LABELLED_VAL)
    yield
    forget_runs(LABELLED_TRAIN, LABELLED_VAL)


def make_class_folders(folder: Path, names: tuple[str, ...] = tuple(COLOURS)) -> Path:
    generator = torch.Generator().manual_seed(0)
    for name in names:
        (folder / name).mkdir(parents=True)
        for index in range(4):
            noise = torch.randint(0, 56, (48, 40, 3), generator=generator)
            pixels = (noise + torch.tensor(COLOURS[name])).to(torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / name / f"{index}.png")
    return folder


def start(
    output_dir: Path, recipe: str, folder: Path, opts: dict[str, str], *flags: str
) -> Trainer:
    """Returns the trainer of ``tools/train_net.py`` before its first step."""
    forget_runs(LABELLED_TRAIN, LABELLED_VAL)
    parser = argparse.ArgumentParser()
    add_training_flags(parser)
    add_data_flags(parser)
    add_image_flags(parser)
    pairs = {**OPTS, **opts, "OUTPUT_DIR": str(output_dir)}
    words = [word for pair in pairs.items() for word in pair]
    given = ["--config-file", get_config_path(recipe), "--train-folder", str(folder), *flags]
    args = parser.parse_args([*given, *words])
    cfg = build_config(args)
    setup(cfg, args)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer


def _part(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}


def _copy(trainer: Trainer) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in trainer.bare_model.state_dict().items()}


def test_a_probed_encoder_stays_and_fine_tuning_starts_from_it_and_its_decoder(
    tmp_path: Path,
) -> None:
    folder = make_class_folders(tmp_path / "train")
    probe = start(tmp_path / "probe", PROBE, folder, {})
    before = _copy(probe)
    probe.train()
    after = _copy(probe)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == name.startswith("backbone."), name
    assert json.loads((tmp_path / "probe" / "metrics.json").read_text().splitlines()[-1])[
        "accuracy"
    ] in (0, 25, 50, 75, 100)
    for file in ("model_final.pth", "model_final.safetensors"):
        weights = {"MODEL.WEIGHTS": str(tmp_path / "probe" / file)}
        tuned = start(tmp_path / file, FINETUNE, folder, weights)
        loaded = _copy(tuned)
        assert _part(loaded, "decoder").keys() == _part(after, "decoder").keys()
        for name, tensor in after.items():
            assert torch.equal(loaded[name], tensor), name
    tuned.train()
    moved = {
        name: not torch.equal(tensor, loaded[name])
        for name, tensor in tuned.bare_model.named_parameters()
    }
    assert moved["backbone.stem.weight"]
    assert sum(moved.values()) > 0.9 * len(moved)  # some of a ReLU's are without a gradient


def test_other_classes_keep_the_rows_of_those_that_stay(tmp_path: Path) -> None:
    probe = start(tmp_path / "probe", PROBE, make_class_folders(tmp_path / "three"), {})
    probe.train()
    old = probe.bare_model.decoder.classifier.weight
    two = make_class_folders(tmp_path / "two", ("blue", "red"))
    weights = {"MODEL.WEIGHTS": str(tmp_path / "probe" / "model_final.pth")}
    tuned = start(tmp_path / "tuned", FINETUNE, two, weights)
    torch.testing.assert_close(tuned.bare_model.decoder.classifier.weight, old[[0, 2]])


def test_a_fine_tuning_that_was_interrupted_ends_with_the_same_weights(tmp_path: Path) -> None:
    folder, run = make_class_folders(tmp_path / "train"), tmp_path / "run"
    opts = {"MODEL.MOBILE_FORMER.DROP_PATH": "0.2"}  # besides mixing, dropout and augmentation
    start(run, FINETUNE, folder, opts).train()
    whole, expected = state(run)["model"], losses(run)
    assert sorted(expected) == [0, 1, 2, 3]
    (run / "model_final.pth").unlink()
    (run / "last_checkpoint").write_text("model_0000001.pth")
    start(run, FINETUNE, folder, opts, "--resume").train()
    assert losses(run) == expected
    for name, tensor in state(run)["model"].items():
        assert torch.equal(tensor, whole[name]), name


def test_the_supervised_objective_learns_colours(tmp_path: Path) -> None:
    folder = make_class_folders(tmp_path / "train")
    opts = {"SOLVER.MAX_ITER": "30", "SOLVER.BASE_LR": "0.01", "SOLVER.CHECKPOINT_PERIOD": "30"}
    recipe = "objectives/supervised.yaml"
    trainer = start(tmp_path / "run", recipe, folder, {**opts, "SOLVER.REFERENCE_BATCH_SIZE": "8"})
    trainer.train()
    seen = losses(tmp_path / "run")
    assert seen[0] == pytest.approx(math.log(3), abs=0.1)
    assert seen[29] < 0.3

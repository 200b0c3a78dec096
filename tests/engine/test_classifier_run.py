# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probing and fine-tuning of classifiers from shipped recipes: frozen, handed over, resumed."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from qbheat_det.config import get_config_path
from qbheat_det.engine import Trainer

from .tiny_pretraining import OPTS as PRETRAINING_OPTS
from .tiny_training import losses, parse_run, start_run, state

PROBE, FINETUNE = "ImageNet-probing/tran1_3.7G.yaml", "ImageNet-finetune/tran1_3.7G.yaml"
OPTS = {
    **PRETRAINING_OPTS,
    "MODEL.CLASSIFIER.WIDTH": "64",
    "INPUT.PRETRAIN.SIZE": "32",
    "DATALOADER.NUM_WORKERS": "0",
    "SOLVER.IMS_PER_BATCH": "8",
    "SOLVER.BASE_LR": "0.05",  # for 256 images
}
COLOURS = {"blue": (0, 0, 200), "green": (0, 200, 0), "red": (200, 0, 0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of four noisy images each."""
    root = tmp_path_factory.mktemp("classes")
    generator = torch.Generator().manual_seed(0)
    for name, colour in COLOURS.items():
        (root / name).mkdir()
        for index in range(4):
            noise = torch.randint(0, 56, (48, 40, 3), generator=generator)
            pixels = (noise + torch.tensor(colour)).to(torch.uint8)
            Image.fromarray(pixels.numpy()).save(root / name / f"{index}.png")
    return root


def start(
    output_dir: Path, recipe: str, folder: Path, opts: dict[str, str], *flags: str
) -> Trainer:
    """Returns the trainer before its first step."""
    pairs = {**OPTS, **opts, "OUTPUT_DIR": str(output_dir)}
    args = parse_run(get_config_path(recipe), pairs, "--data", str(folder), *flags)
    return start_run(args)


def copy_state(trainer: Trainer) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in trainer.bare_model.state_dict().items()}


def test_a_probed_encoder_stays_and_fine_tuning_starts_from_it_and_resumes(
    folder: Path, tmp_path: Path
) -> None:
    probe = start(tmp_path / "probe", PROBE, folder, {})
    before = copy_state(probe)
    probe.train()
    after = copy_state(probe)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == name.startswith("backbone."), name
    assert '"accuracy"' in (tmp_path / "probe" / "metrics.json").read_text()

    run = tmp_path / "tuned"
    opts = {
        "MODEL.WEIGHTS": str(tmp_path / "probe" / "model_final.safetensors"),
        "MODEL.MOBILE_FORMER.DROP_PATH": "0.2",  # besides mixing, dropout and augmentation
    }
    tuned = start(run, FINETUNE, folder, opts)
    loaded = copy_state(tuned)
    shared = {name: loaded[name] for name in after}  # frozen norms count no batches
    torch.testing.assert_close(shared, after, rtol=0, atol=0)
    tuned.train()
    whole, expected = state(run)["model"], losses(run)
    moved = [name for name, p in tuned.bare_model.named_parameters() if (p != loaded[name]).any()]
    assert "backbone.stem.weight" in moved
    (run / "model_final.pth").unlink()
    (run / "last_checkpoint").write_text("model_0000001.pth")
    start(run, FINETUNE, folder, opts, "--resume").train()
    assert losses(run) == expected
    torch.testing.assert_close(state(run)["model"], whole, rtol=0, atol=0)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images that cannot be read: met, named, counted, and known after a run was resumed."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils import comm
from torch import Tensor, nn

from qbheat_det.config import get_cfg
from qbheat_det.data import DataError, register_image_folders
from qbheat_det.engine import Trainer
from qbheat_det.engine.monitors import SKIPPED_FILE, SkippedImages
from tests.data.pictures import draw, save

from .conftest import forget_runs

NAME = "broken_images_of_a_test"


def error(name: str) -> DataError:
    return DataError("unreadable image", f"image '{name}'", "no image at all")


def make_trainer(folder: Path, max_iter: int = 4) -> Any:
    """A trainer as far as the hook knows one."""
    return SimpleNamespace(
        iter=0,
        max_iter=max_iter,
        cfg=SimpleNamespace(OUTPUT_DIR=str(folder)),
        data_loader=SimpleNamespace(skipped={}, num_images=1000),
    )


def make_hook(trainer: Any, period: int = 0) -> SkippedImages:
    hook = SkippedImages(period=period)
    hook.trainer = trainer
    return hook


def test_new_images_are_named_in_the_period_and_all_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path)
    hook = make_hook(trainer, period=2)
    named = []
    for trainer.iter, name in enumerate("abca"):
        caplog.clear()
        trainer.data_loader.skipped[f"image '{name}'"] = error(name)
        hook.after_step()
        named.append([name for name in "abc" if f"image '{name}'" in caplog.text])
    assert named == [[], ["a", "b"], [], ["c"]]
    caplog.clear()
    hook.after_train()
    assert "3 of 1,000 images were skipped: image 'a': no image at all; image 'b'" in caplog.text
    lines = (tmp_path / SKIPPED_FILE).read_text().splitlines()
    assert lines == [f"image '{name}': no image at all" for name in "abc"]


def test_the_log_stays_short_and_the_file_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, max_iter=1)
    hook = make_hook(trainer)
    trainer.data_loader.skipped = {str(i): error(f"{i:04d}") for i in range(300)}
    hook.after_step()
    assert " and 290 more" in caplog.text
    assert "0010" not in caplog.text
    assert len((tmp_path / SKIPPED_FILE).read_text().splitlines()) == 300


def test_a_name_that_is_no_text_can_be_written(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_iter=1)
    hook = make_hook(trainer)
    trainer.data_loader.skipped = {"a": DataError("unreadable image", "image 'a\udcff'", "")}
    hook.after_step()
    assert "udcff" in (tmp_path / SKIPPED_FILE).read_text()


def test_what_other_processes_met_is_known_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, max_iter=1)
    hook = make_hook(trainer)
    trainer.data_loader.skipped = {"a": error("a")}
    monkeypatch.setattr(comm, "all_gather", lambda met: [met, [error("b")], [error("a")]])
    hook.after_step()
    assert sorted(hook.errors) == ["image 'a'", "image 'b'"]
    again = make_hook(trainer)
    again.load_state_dict(hook.state_dict())
    assert again.errors == hook.errors


@META_ARCH_REGISTRY.register()
class MeanColour(nn.Module):
    """Learns the mean of its images."""

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3))

    def forward(self, batched_inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        images = torch.stack([image["image"] for image in batched_inputs]).float() / 255
        return {"loss_mean": (images.mean(dim=(2, 3)) - self.mean).square().mean()}


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(6):
        save(folder / f"{i}.jpg", draw(40, 30, seed=i))
    for i in (1, 4):
        (folder / f"{i}.jpg").write_bytes(b"broken")
    yield folder
    forget_runs(NAME)


def make_run(output: Path, images: Path, max_iter: int) -> Trainer:
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE = "MeanColour"
    cfg.MODEL.DEVICE = "cpu"
    cfg.INPUT.DATASET_MAPPER_NAME = "pretrain"
    cfg.INPUT.PRETRAIN.SIZE = 16
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (NAME,), ()
    cfg.DATALOADER.NUM_WORKERS = 1
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = False
    cfg.SOLVER.IMS_PER_BATCH = 3
    cfg.SOLVER.MAX_ITER = max_iter
    cfg.SOLVER.STEPS = ()
    cfg.SEED = 3
    cfg.OUTPUT_DIR = str(output)
    register_image_folders(NAME, [images])
    trainer = Trainer(cfg)
    if not any(isinstance(hook, SkippedImages) for hook in trainer._hooks):
        trainer._hooks.insert(-1, make_hook(trainer))
    return trainer


def test_a_run_on_images_with_broken_ones_ends_well_and_a_resumed_one_still_knows_them(
    tmp_path: Path, images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    with caplog.at_level(logging.WARNING, "qbheat_det"):
        make_run(output, images, 4).train()  # two epochs
    assert "2 of 6 images were skipped: image " in caplog.text
    lines = (output / SKIPPED_FILE).read_text().splitlines()
    assert [Path(line.split("'")[1]).name for line in lines] == ["1.jpg", "4.jpg"]
    resumed = make_run(output, images, 5)
    resumed.resume_or_load(resume=True)
    (hook,) = (hook for hook in resumed._hooks if isinstance(hook, SkippedImages))
    assert [error.where.rpartition("/")[2] for error in hook._sorted()] == ["1.jpg'", "4.jpg'"]

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""BatchNorm's statistics over whole images, against means and variances taken by hand."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import Backbone
from PIL import Image
from torch import Tensor, nn

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.data import load_image_folders
from qbheat_det.probing.batch_norm import read_whole_images, recalibrate_bn, training_records

MEAN, STD = (100.0, 110.0, 120.0), (50.0, 60.0, 70.0)


class _TwoLayers(Backbone):
    """Two norms, and dropout between them that must be off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.9)
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"s1": self.second(self.conv(self.dropout(self.first(x))))}


def _images(sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]


def _normalise(image: Tensor) -> Tensor:
    return (image - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def _positions(maps: Sequence[Tensor]) -> Tensor:
    """(C, all positions of all maps)."""
    return torch.cat([x.flatten(-2).transpose(0, 1).flatten(1) for x in maps], dim=1).double()


def test_the_first_norm_gets_mean_and_variance_of_all_positions_of_all_images() -> None:
    images = _images([(8, 8), (6, 10), (8, 8), (5, 7), (8, 8)])
    backbone = _TwoLayers()
    assert recalibrate_bn(backbone, images, pixel_mean=MEAN, pixel_std=STD, batch_size=2) == 2
    values = _positions([_normalise(image)[None] for image in images])
    mean, variance = values.mean(dim=1), values.var(dim=1, unbiased=False)
    torch.testing.assert_close(backbone.first.running_mean.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(backbone.first.running_var.double(), variance, rtol=1e-5, atol=1e-6)


def test_a_later_norm_sees_what_the_layers_below_make_of_its_batch() -> None:
    backbone = _TwoLayers()
    nn.init.uniform_(backbone.first.weight)
    images = _images([(8, 8)] * 4)
    recalibrate_bn(backbone, images, pixel_mean=MEAN, pixel_std=STD)
    x = torch.stack([_normalise(image) for image in images])
    centred = x - x.mean(dim=(0, 2, 3), keepdim=True)
    scale = (
        backbone.first.weight.view(-1, 1, 1)
        / (x.var(dim=(0, 2, 3), unbiased=False, keepdim=True) + backbone.first.eps).sqrt()
    )
    with torch.no_grad():
        values = _positions([backbone.conv(centred * scale)])
    for found, expected in (
        (backbone.second.running_mean, values.mean(dim=1)),
        (backbone.second.running_var, values.var(dim=1, unbiased=False)),
    ):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_nothing_but_the_statistics_of_norms_that_are_not_frozen_changes() -> None:
    backbone = _TwoLayers().train()
    backbone.second = FrozenBatchNorm2d.convert_frozen_batchnorm(backbone.second)
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    modes = {name: module.training for name, module in backbone.named_modules()}
    images = _images([(8, 8)] * 3)
    assert recalibrate_bn(backbone, images, pixel_mean=MEAN, pixel_std=STD) == 1
    for key, value in backbone.state_dict().items():
        if not key.startswith(("first.running", "first.num_batches")):
            torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    assert {name: module.training for name, module in backbone.named_modules()} == modes
    assert backbone.first.momentum == 0.1
    constant = [torch.full((3, 8, 8), 200, dtype=torch.uint8)] * 3
    recalibrate_bn(backbone, constant, pixel_mean=MEAN, pixel_std=(0.001,) * 3, batch_size=1)
    assert (backbone.first.running_var >= 0).all()  # whatever the rounding


def test_images_come_whole_through_the_configs_mapper_and_without_repetition(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for index in range(6):
        Image.new("RGB", (40, 30), (40 * index, 0, 0)).save(tmp_path / f"{index}.png")
    cfg = get_cfg()
    cfg.INPUT.FORMAT = "RGB"
    cfg.INPUT.MIN_SIZE_TEST = 60
    cfg.DATALOADER.NUM_WORKERS = 0
    records = load_image_folders([tmp_path])[0]
    first, again = (read_whole_images(cfg, records, 4) for _ in range(2))
    assert {image.shape for image in first} == {(3, 60, 80)}
    reds = [int(image[0].float().mean()) for image in first]
    assert len(set(reds)) == 4
    assert reds == [int(image[0].float().mean()) for image in again]
    # Broken images are left out and named.
    cfg.INPUT.DATASET_MAPPER_NAME = "pretrain"
    (tmp_path / "broken.png").write_bytes(b"no image")
    records = load_image_folders([tmp_path])[0]
    assert len(read_whole_images(cfg, records, 100)) == 6
    assert "broken.png" in caplog.text
    with pytest.raises(UserError, match=r"broken\.png"):
        read_whole_images(cfg, [r for r in records if "broken" in r["file_name"]], 2)
    with pytest.raises(UserError):
        recalibrate_bn(_TwoLayers(), [], pixel_mean=MEAN, pixel_std=STD)


def test_a_training_set_that_is_not_known_here_is_named() -> None:
    cfg = get_cfg()
    cfg.DATASETS.TRAIN = ("of_another_machine",)
    with pytest.raises(UserError, match=r"'of_another_machine'.*--images"):
        training_records(cfg)
    DatasetCatalog.register("of_this_machine", lambda: [{"file_name": "a.png"}])
    cfg.DATASETS.TRAIN = ("of_this_machine",)
    assert training_records(cfg) == [{"file_name": "a.png"}]
    DatasetCatalog.remove("of_this_machine")

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probes of files and of random backbones, side by side; BatchNorm recalibrated on whole images."""

import json
import re
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import Backbone, build_model
from PIL import Image
from torch import nn

from qbheat_det.checkpoint import WeightsInfo, info_of, local_weights, save_weights
from qbheat_det.config import get_cfg, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.data import PretrainingMapper, load_class_folders, load_image_folders
from qbheat_det.evaluation import HeldOutLossEvaluator
from qbheat_det.export import export_backbone
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from qbheat_det.modeling.contracts import get_views
from qbheat_det.probing.features import (
    read_whole_images,
    recalibrate_bn,
    training_records,
)
from tests.engine.classifier_cases import make_classes
from tests.modeling.tiny_pretraining import make_tiny_config
from tests.tool_modules import load_tool, refuse

main = load_tool("probe_backbone").main


def make_config(tmp_path, backbone="timm:resnet10t"):
    """Writes a config of a small network of timm, at 32 pixels."""
    path = tmp_path / f"{backbone.replace(':', '_')}.yaml"
    path.write_text(
        f"MODEL: {{DEVICE: cpu, BACKBONE: {{NAME: '{backbone}', FREEZE_AT: 0}}}}\n"
        "INPUT: {PRETRAIN: {SIZE: 32}}\nDATALOADER: {NUM_WORKERS: 0}\nTEST: {KNN: {K: 3}}\n"
    )
    return str(path)


@pytest.fixture
def folders(tmp_path):
    """Flags that name two folders of three classes each, with a broken image."""
    train = make_classes(tmp_path / "train", dict.fromkeys("abc", 3))
    val = make_classes(tmp_path / "val", dict.fromkeys("abc", 3), first=100)
    (tmp_path / "train" / "b" / "x.png").write_text("no image")
    return ["--data", train, "--val", val]


def probe(words, tmp_path):
    main([*words, "--json", str(tmp_path / "out.json")])
    return dict(json.loads((tmp_path / "out.json").read_text()))


def write_weights(cfg, path, seed):
    torch.manual_seed(seed)
    backbone = build_bare_backbone(cfg)
    state = {f"backbone.{name}": value for name, value in backbone.state_dict().items()}
    save_weights(str(path), state, WeightsInfo())


def test_rows_are_files_and_random_backbones_without_and_with_new_statistics(
    folders, tmp_path, capsys, caplog
):
    config = make_config(tmp_path)
    weights, bare = tmp_path / "w.safetensors", tmp_path / "bare.safetensors"
    write_weights(load_config(config), weights, seed=7)
    export_backbone(str(weights), bare)
    words = ["--config-file", config, "--weights", str(weights), str(bare), *folders]
    words += ["--random-seeds", "7", "8", "--recalibrate-bn", "4", "--probes", "knn"]
    found = probe(words, tmp_path)
    table = capsys.readouterr().out
    rows = found["rows"]
    names = [str(weights), str(bare), "random, seed 7", "random, seed 8"]
    assert [(row["backbone"], row["recalibrated"], row["probe"]) for row in rows] == [
        (name, number, "knn") for name in names for number in (0, 4)
    ]
    # What a file holds is scored as what it was written from.
    own = ("backbone", "images_seen", "seconds")
    scores = [{k: v for k, v in row.items() if k not in own} for row in rows]
    assert scores[0:2] == scores[2:4] == scores[4:6]
    assert scores[4:6] != scores[6:8]
    assert [row["images_seen"] for row in rows[::2]] == [None, None, 0, 0]
    assert {row["num_images"] for row in rows} == {9}
    setting = found["setting"]
    assert (setting["feature"], setting["knn"]["k"], found["skipped_images"]) == ("s16", 3, 1)
    assert "Left out, 1 in all" in caplog.text
    assert "x.png" in caplog.text
    assert f"| {names[2]} " in table
    assert "as stored" in table
    # What stands in the file is not worked out again, and told again.
    assert probe(words, tmp_path) == found
    assert capsys.readouterr().out == table


def test_weights_that_reconstruct_images_have_a_loss_beside_baselines(folders, tmp_path, capsys):
    cfg = make_tiny_config("QBHeat")
    model = build_model(cfg)
    weights, bare = tmp_path / "w.safetensors", tmp_path / "bare.safetensors"
    info = WeightsInfo.from_config(cfg, iteration=1, commit="")
    save_weights(str(weights), model.state_dict(), info)
    export_backbone(str(weights), bare)
    words = ["--weights", str(weights), str(bare), "--probes", "knn", *folders, "TEST.KNN.K", "3"]
    found = probe(words, tmp_path)
    assert list(found["losses"]) == [str(weights)]
    losses = found["losses"][str(weights)]
    assert losses["num_images"] == 9
    entries = PretrainingMapper(cfg, is_train=False)
    records = load_class_folders(folders[1], folders[3])[1]
    evaluator = HeldOutLossEvaluator("val")
    with torch.no_grad():
        for places in get_views(cfg).values():
            for index, record in enumerate(records):
                entry = {**entries(record), "place": places[index % len(places)]}
                evaluator.process([entry], model.eval()([entry]))
    expected = evaluator.evaluate()["reconstruction"]
    assert losses["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert losses["mean"] == pytest.approx(expected["mean"], rel=1e-5)
    assert f"(zero {losses['zero']:.4f}, mean" in capsys.readouterr().out
    assert probe(words, tmp_path) == found


def test_a_repeated_command_continues_with_the_missing_rows(folders, tmp_path):
    words = ["--config-file", make_config(tmp_path), "--random", *folders]
    first = probe([*words, "--probes", "knn"], tmp_path)
    both = probe([*words, "--probes", "knn", "tran-1"], tmp_path)
    assert both["rows"][0] == first["rows"][0]
    assert both["rows"][1]["probe"] == "tran-1"
    assert both["rows"][1]["chosen"]["epochs"] >= 1


def test_results_of_other_settings_are_refused_and_of_other_weights_replaced(
    folders, tmp_path, capsys
):
    config, weights = make_config(tmp_path), tmp_path / "w.safetensors"
    words = ["--config-file", config, "--weights", str(weights), "--probes", "knn", *folders]
    digests = set()
    for seed in (1, 2):
        write_weights(load_config(config), weights, seed=seed)
        (row,) = probe(words, tmp_path)["rows"]
        digests.add(row["digest"])
    assert len(digests) == 2
    words += ["--json", str(tmp_path / "out.json")]
    assert "(pixels)" in refuse(main, [*words, "MODEL.PIXEL_STD", "[2.0, 2.0, 2.0]"], capsys)
    image = next(Path(folders[1]).rglob("*.jpg"))
    image.rename(image.with_name("another.jpg"))
    assert "(contents)" in refuse(main, words, capsys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--weights", "w.safetensors"], "--config-file"),
        ([], "--weights FILE"),
        (["--random", "--feature", "s4"], "s4"),
        (["--random", "--recalibrate-bn", "-1"], "--recalibrate-bn"),
        (["--random", "TEST.KNN.K", "0"], "TEST.KNN.K"),
        *((["--random", "--probes", name], f"'{name}'") for name in ("lin", "tran-0")),
        (["--random", "--probes", "tran-1", "--memory-gb", "1e-6"], "--memory-gb"),
        (["--random", "--val", "other"], "other'"),
        (["--random", "--data", "broken"], "--data"),
        *((["--random", "--json", f"{name}.json"], name) for name in ("text", "rows")),
    ],
)
def test_bad_arguments_are_named(words, expected, folders, tmp_path, capsys):
    if "w.safetensors" in words:
        other = load_config(make_config(tmp_path, "timm:resnet14t"))
        write_weights(other, tmp_path / "w.safetensors", seed=0)
    make_classes(tmp_path / "other", {"d": 1})
    for name in "abc":
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "0.png").write_text("no image")
    contents = {"text.json": "no json", "rows.json": '{"setting": {}, "rows": [3]}'}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    made = ("w.safetensors", "other", "broken", *contents)
    given = [str(tmp_path / word) if word in made else word for word in words]
    said = refuse(main, ["--config-file", make_config(tmp_path), *folders, *given], capsys)
    assert re.search(expected, said)
    assert all((tmp_path / name).read_text() == text for name, text in contents.items())


def test_images_seen_are_those_of_all_steps_that_went_into_the_weights():
    cfg = get_cfg()
    cfg.SOLVER.IMS_PER_BATCH = 64
    info = WeightsInfo.from_config(cfg, iteration=186, commit="")
    assert info.images_seen == 187 * 64
    later = WeightsInfo.from_config(cfg, iteration=9, commit="", images_seen_before=187 * 64)
    assert later.images_seen == 197 * 64
    assert WeightsInfo.from_dict(later.to_dict()) == later
    converted = WeightsInfo(config="VERSION: 2")  # keys of the encoder only
    for unknown in (converted, WeightsInfo(config="NO_KEY: 1", iteration=1)):
        assert unknown.images_seen is None
    # Four runs, each from the weights of the one before.
    zoo = info_of(local_weights("qbheat://distill/285M"))
    assert zoo.images_seen == 1_436_544


MEAN, STD = (100.0, 110.0, 120.0), (50.0, 60.0, 70.0)


class _TwoLayers(Backbone):
    """Two norms, and dropout between them that must be off."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.dropout = nn.Dropout(0.9)

    def forward(self, x):
        return {"s1": self.second(self.dropout(self.first(x)))}


def _images(sizes):
    return [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]


def test_norms_get_mean_and_variance_of_all_positions_of_all_images():
    images = _images([(8, 8), (6, 10), (8, 8), (5, 7), (8, 8)])
    backbone = _TwoLayers()
    assert recalibrate_bn(backbone, images, pixel_mean=MEAN, pixel_std=STD, batch_size=2) == 2
    mean, std = (torch.tensor(values).view(3, 1) for values in (MEAN, STD))
    values = torch.cat([(image.flatten(1) - mean) / std for image in images], dim=1).double()
    variance = values.var(dim=1, unbiased=False)
    first, second = backbone.first, backbone.second
    torch.testing.assert_close(
        first.running_mean.double(), values.mean(dim=1), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(first.running_var.double(), variance, rtol=1e-5, atol=1e-6)
    # The second norm sees each batch as the first one normalizes it, by the batch.
    torch.testing.assert_close(second.running_var, torch.ones(3), rtol=1e-3, atol=1e-3)


def test_nothing_but_the_statistics_of_norms_that_are_not_frozen_changes():
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


def test_images_come_whole_through_the_configs_mapper_and_without_repetition(tmp_path, caplog):
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


def test_a_training_set_that_is_not_known_here_is_named():
    cfg = get_cfg()
    cfg.DATASETS.TRAIN = ("of_another_machine",)
    with pytest.raises(UserError, match=r"'of_another_machine'.*--images"):
        training_records(cfg)
    DatasetCatalog.register("of_this_machine", lambda: [{"file_name": "a.png"}])
    cfg.DATASETS.TRAIN = ("of_this_machine",)
    assert training_records(cfg) == [{"file_name": "a.png"}]
    DatasetCatalog.remove("of_this_machine")

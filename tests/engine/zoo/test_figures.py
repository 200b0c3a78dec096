# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures as people write them, as files hold them, and as the tool measures them."""

import argparse
import json
import math
import re
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import build_model

import qbheat_det.model_zoo.add as figures_module
from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.data import ImageBatches, build_mapper
from qbheat_det.engine.class_folders import LABELLED_VAL
from qbheat_det.model_zoo import Metric, index
from qbheat_det.model_zoo.add import measure_figures, parse_figure, read_figures
from qbheat_det.model_zoo.api import open_trained
from tests.engine.classifier_cases import make_classes
from tests.engine.gradient_cases import CLASSIFIER, Case, make_case_config
from tests.tool_modules import load_tool


@pytest.mark.parametrize(
    ("text", "figure"),
    [
        ("AP=21.3%:Aquarium val", Metric("AP", 21.3, "%", "Aquarium val")),
        (
            "kNN top-1 = 61.2 ± 0.4 % : Caltech-101 val : k = 20, 3 seeds",
            Metric("kNN top-1", 61.2, "%", "Caltech-101 val", "±0.4", "k = 20, 3 seeds"),
        ),
        ("latency=7+-1ms:a CPU", Metric("latency", 7.0, "ms", "a CPU", "±1")),
        ("loss=-0.5:toy:at 10:30", Metric("loss", -0.5, "", "toy", "", "at 10:30")),
    ],
)
def test_a_figure_is_read_as_it_is_written(text: str, figure: Metric) -> None:
    assert parse_figure(text) == figure


@pytest.mark.parametrize("text", ["AP=21.3", "AP:val", "=3:val", "AP=high:val", "AP=1.2.3:val:"])
def test_half_a_figure_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--figure '{text}' is not METRIC=VALUE:DATA")):
        parse_figure(text)


def test_figures_come_from_a_file_that_is_read_strictly(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    file.write_text(json.dumps([{"metric": "AP", "value": 2, "unit": "%", "data": "toy"}]))
    assert read_figures(file) == [Metric("AP", 2.0, "%", "toy")]
    file.write_text(json.dumps([{"metric": "AP", "value": "2", "unit": "%", "data": "toy"}]))
    with pytest.raises(UserError, match="figure 0: 'value'"):
        read_figures(file)
    file.write_text("{}")
    with pytest.raises(UserError, match="is no list of figures"):
        read_figures(file)
    with pytest.raises(UserError, match=r"none\.json' cannot be read"):
        read_figures(tmp_path / "none.json")


def test_a_pretraining_has_its_held_out_loss_beside_nearest_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = {"loss_corner": 0.83174, "loss_centre": 0.7872, "loss": 0.80947}
    results = {
        "reconstruction": {**losses, "loss_standard_error": 0.00421},
        "knn": {"top1": 16.04, "top1_standard_error": 1.06},
    }
    monkeypatch.setattr(figures_module, "build_config", lambda args: None)
    monkeypatch.setattr(figures_module, "evaluate", lambda cfg: results)
    knn, loss = measure_figures(Path("w.safetensors"), "toy val", argparse.Namespace())
    assert (knn.metric, knn.value, knn.unit) == ("kNN top-1", 16.04, "%")
    note = "corner 0.8317, centre 0.7872"
    spread = "±0.0042, the standard error"
    assert loss == Metric("held-out loss", 0.8095, "", "toy val", spread, note)
    results["reconstruction"] = {"loss": 0.5, "loss_standard_error": math.nan}
    _, loss = measure_figures(Path("w.safetensors"), "toy val", argparse.Namespace())
    assert loss == Metric("held-out loss", 0.5, "", "toy val")


def test_the_tool_measures_the_file_that_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_classes(tmp_path / "val", {"a": 5, "b": 3, "c": 4})
    cfg = make_case_config(Case(CLASSIFIER), "cpu")
    cfg.MODEL.CLASS_NAMES, cfg.DATALOADER.NUM_WORKERS = ["a", "b", "c"], 0
    torch.manual_seed(3)
    info = WeightsInfo.from_config(cfg, iteration=1, commit="c0ffee1")
    save_weights(f"{tmp_path}/run.safetensors", build_model(cfg).state_dict(), info)
    words = {
        "--weights": f"{tmp_path}/run.safetensors",
        "--name": "tran1/tiny_shapes",
        "--config": "custom/tran1_285M_probe.yaml",
        "--summary": "A tiny classifier",
        "--data": "drawn shapes",
        "--data-licence": "CC0-1.0",
        "--command": "python tools/train_net.py …",
        "--figure": "speed=2ms:a CPU",
        "--evaluate": "shapes val",
        "--val-folder": folder,
        "--output": f"{tmp_path}/mine",
    }
    try:
        assert load_tool("zoo").main(["add", *[w for pair in words.items() for w in pair]]) == 0
        records = DatasetCatalog.get(LABELLED_VAL)
    finally:
        DatasetCatalog.remove(LABELLED_VAL)
        MetadataCatalog.remove(LABELLED_VAL)
    (entry,) = index.load_index(tmp_path / "mine" / "index.json")
    assert '"name": "tran1/tiny_shapes"' in capsys.readouterr().out
    assert entry.task == "classification"
    speed, top1, _ = entry.figures
    assert speed == Metric("speed", 2.0, "ms", "a CPU")
    trained = open_trained(str(tmp_path / "mine" / entry.file))
    mapper = build_mapper(trained.cfg, is_train=False)
    (batch,) = ImageBatches(records, mapper=mapper, batch_size=12, shared=False)
    with torch.no_grad():
        said = torch.stack([one["scores"] for one in trained.model(batch)]).argmax(dim=1)
    right = sum(int(a) == one["label"] for a, one in zip(said, batch, strict=True))
    assert (top1.metric, top1.unit, top1.data) == ("top-1", "%", "shapes val")
    assert top1.value == pytest.approx(100 * right / 12, abs=0.01)
    assert top1.spread.endswith("the binomial standard error")

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fingerprints and verification: which output changed, which field disagrees; tools/zoo.py."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model

import qbheat_det.model_zoo.verify as verify_module
from qbheat_det.checkpoint import read_weights, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import hash_file
from qbheat_det.model_zoo import ZooEntry
from qbheat_det.model_zoo.add import add_entry
from qbheat_det.model_zoo.index import load_index
from qbheat_det.model_zoo.sources import open_trained
from qbheat_det.model_zoo.verify import (
    TOLERANCE,
    compare_fingerprints,
    compute_fingerprint,
    count_costs,
    verify_entry,
)
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from tests.engine.gradient_cases import CLASSIFIER, MF_DETR, Case, make_case_config
from tests.engine.tiny_detectors import make_retinanet_config
from tests.modeling.tiny_pretraining import make_tiny_config
from tests.tool_modules import load_tool, refuse

from .conftest import BACKBONE, CONTENT, DETECTOR, MakeEntry, Trained, make_entry, save_index
from .test_add import ORIGIN

main = load_tool("zoo").main


@pytest.fixture(scope="session")
def added(backbone: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[ZooEntry, bytes]:
    """The entry of the tiny backbone, and the content of its file."""
    folder = tmp_path_factory.mktemp("added")
    entry = add_entry(str(backbone.path), ORIGIN, output=folder)
    return entry, (folder / entry.file).read_bytes()


@pytest.fixture
def entry(added: tuple[ZooEntry, bytes], shipped: Path) -> ZooEntry:
    """That entry, in the package."""
    entry, content = added
    shipped.mkdir()
    (shipped / entry.file).write_bytes(content)
    save_index([entry])
    return entry


def _change_weights(entry: ZooEntry, folder: Path) -> ZooEntry:
    """Writes other weights, and returns an entry with their hash."""
    path = folder / entry.file
    state, info = read_weights(str(path))
    state["expand.norm.bias"] += 0.01
    save_weights(str(path), state, info)
    return dataclasses.replace(entry, sha256=hash_file(path), size=path.stat().st_size)


def test_the_tool_verifies_entries_and_exits_with_1_for_a_wrong_one(
    entry: ZooEntry, shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = dataclasses.replace(entry, name="qb_heat/gone", file="qb_heat-gone.safetensors")
    assert main(["verify"]) == 0
    table = capsys.readouterr().out.splitlines()
    loaded, _, total = table[2].split("|")[3].strip().partition(" of ")
    assert loaded == total
    assert "ok, 0 % of tolerance" in table[2]
    save_index([entry, missing])
    assert main(["verify", "qb_heat/gone", "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    assert verdict["tensors loaded"] == "-"
    assert "qb_heat-gone.safetensors" in verdict["error"]
    # Other weights with the right hash: only the fingerprint can show it.
    save_index([_change_weights(entry, shipped)])
    assert main(["verify"]) == 1
    *_, error, _ = capsys.readouterr().out.splitlines()
    assert error.startswith(f"{BACKBONE}: output 'backbone.s16_expanded'")


def test_a_wrong_field_of_the_index_a_damaged_file_and_failing_code_are_named(
    entry: ZooEntry, backbone: Trained, monkeypatch: pytest.MonkeyPatch, shipped: Path
) -> None:
    trained = open_trained(str(backbone.path), device="cpu")
    costs = count_costs(trained)
    monkeypatch.setattr(verify_module, "open_trained", lambda path, device: trained)
    monkeypatch.setattr(verify_module, "count_costs", lambda trained: costs)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"size": 1}, "'size'"),
        ({"num_params": 1}, "'num_params'"),
        ({"task": "detection"}, "'task'"),
        ({"config": "none.yaml"}, "none.yaml"),
        ({"fingerprint": None}, "fingerprint"),
    ]
    for change, field in changes:
        assert field in verify_entry(dataclasses.replace(entry, **change))["error"]

    def fail(path: str, device: str) -> None:
        raise RuntimeError("shapes\ndo not match")

    monkeypatch.setattr(verify_module, "open_trained", fail)
    assert verify_entry(entry)["error"].endswith("RuntimeError: shapes do not match")
    with (shipped / entry.file).open("ab") as stream:
        stream.write(b"\0")
    verdict = verify_entry(entry)
    assert verdict["file and hash"] == verdict["tensors loaded"] == "-"
    assert entry.file in verdict["error"]


@pytest.fixture
def _two_entries(ship: MakeEntry) -> None:
    ship()
    missing = make_entry("mf_detr/tiny", b"x" * 2**20, metrics=())
    save_index([*load_index(), missing])


@pytest.mark.usefixtures("_two_entries")
def test_the_list_has_metrics_sizes_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["name", "task", "measured", "size", "from"],
        ["mf_detr/tiny", "detection", "none measured", "1.0 MiB", "nowhere"],
        ["retinanet/tiny", "detection", "AP 12.5 %", "20.5 KiB", "shipped"],
        ["on toy val"],
    ]
    assert main(["list", "fcos/*"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fcos/*" in captured.err
    assert main(["list", "retinanet/*", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["from"]) == (DETECTOR, "shipped")
    assert found["metrics"][0]["value"] == 12.5
    assert "fingerprint" not in found


@pytest.mark.usefixtures("_two_entries")
def test_fetched_files_can_be_copied_to_a_folder_for_another_machine(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["fetch", DETECTOR, "retina*"]) == 0
    assert capsys.readouterr().out == f"{shipped}/retinanet-tiny.safetensors\n"
    copy = tmp_path / "copies" / "retinanet-tiny.safetensors"
    for _ in range(2):
        assert main(["fetch", DETECTOR, "--output", str(copy.parent)]) == 0
        assert capsys.readouterr().out == f"{copy}\n"
        monkeypatch.setenv("QBHEAT_ZOO", str(copy.parent))
    assert copy.read_bytes() == CONTENT
    for name, named in (
        *(("retinanet/tiney", DETECTOR), ("fcos/*", "'fcos/*'")),
        ("mf_detr/tiny", "'mf_detr-tiny.safetensors'"),
    ):
        assert named in refuse(main, ["fetch", name], capsys)


def _mf_detr() -> CfgNode:
    cfg = make_case_config(Case(MF_DETR), "cpu")
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = 64, 96
    return cfg


def _classifier() -> CfgNode:
    return make_case_config(Case(CLASSIFIER), "cpu")


def _qb_heat() -> CfgNode:
    cfg = make_tiny_config()
    cfg.INPUT.DATASET_MAPPER_NAME = "pretrain"
    return cfg


@pytest.mark.parametrize(
    ("make_config", "expected"),
    [
        (
            make_retinanet_config,
            {"backbone.p3", "head.0.0", "head.1.4", "image0.scores", "image1.scores"},
        ),
        (_mf_detr, {"backbone.s8", "decoder.pred_logits", "decoder.pred_boxes", "image1.scores"}),
        (_classifier, {"backbone.s16_expanded", "decoder", "image0.scores", "image1.scores"}),
        (_qb_heat, {"backbone.s16_expanded", "predictor", "decoder", "image0.reconstruction"}),
    ],
)
def test_a_fingerprint_has_the_raw_outputs_of_every_kind_of_model_and_is_reproducible(
    make_config: Callable[[], CfgNode], expected: set[str]
) -> None:
    cfg = make_config()
    model = build_model(cfg).train()
    state = torch.random.get_rng_state()
    first = compute_fingerprint(model, cfg)
    assert model.training
    torch.testing.assert_close(torch.random.get_rng_state(), state, rtol=0, atol=0)
    assert expected <= {output.name for output in first.outputs}
    torch.rand(7)
    again = compute_fingerprint(model.eval(), cfg)
    assert first == again
    assert all(one.ratio == 0 for one in compare_fingerprints(first, again))


def test_the_numbers_are_those_of_the_output() -> None:
    cfg, outputs = _qb_heat(), []
    backbone = build_bare_backbone(cfg).eval()
    backbone.register_forward_hook(lambda *call: outputs.append(call[2]["s16_expanded"].double()))
    (output,) = compute_fingerprint(backbone, cfg).outputs
    (whole,) = outputs
    assert output.shape == tuple(whole.shape)
    expected = torch.stack([whole.mean(), whole.std(correction=0)])
    found = torch.tensor([output.mean, output.std], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # The sampled values lie a golden section of the output apart.
    places = [int(math.fmod(k * 0.6180339887498949, 1) * whole.numel()) for k in range(10)]
    values = torch.tensor(output.values, dtype=torch.float64)
    torch.testing.assert_close(values, whole.flatten()[places], rtol=1e-5, atol=1e-5)
    assert output.tolerance == pytest.approx(TOLERANCE * output.std, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda model, cfg: setattr(cfg.INPUT, "FORMAT", "BGR"), "backbone.p3"),
        (lambda model, cfg: model.pixel_mean.add_(2.0), "backbone.p3"),
        (lambda model, cfg: model.head.bbox_pred.weight.data.mul_(1.01), "head.1.0"),
    ],
)
def test_a_change_is_found_at_the_first_output_that_it_reaches(
    change: Callable[[Any, CfgNode], object], first: str
) -> None:
    cfg = make_retinanet_config()
    model = build_model(cfg).eval()
    before = compute_fingerprint(model, cfg)
    change(model, cfg)
    deviations = compare_fingerprints(before, compute_fingerprint(model, cfg))
    assert next(one.output for one in deviations if one.ratio > 1) == first


def test_outputs_that_are_nan_missing_new_or_of_another_shape_are_found() -> None:
    cfg = _classifier()
    whole = compute_fingerprint(build_model(cfg), cfg)
    first, *others = whole.outputs
    broken = build_model(cfg)
    with torch.no_grad():
        next(broken.decoder.parameters()).fill_(math.nan)
    with pytest.raises(UserError, match="'decoder'"):
        compute_fingerprint(broken, cfg)

    def deviations(expected: Any, found: Any) -> dict[str, float]:
        prints = [dataclasses.replace(whole, outputs=tuple(o)) for o in (expected, found)]
        return {one.output: one.ratio for one in compare_fingerprints(*prints)}

    reshaped = dataclasses.replace(first, shape=(1, 2))
    assert deviations(whole.outputs, [reshaped, *others])[first.name] == math.inf
    assert deviations(whole.outputs, others)[first.name] == math.inf
    assert deviations(others, whole.outputs)[first.name] == math.inf
    # The tolerance in an index is not trusted.
    for tolerance in (1e9, -1e9):
        lax = dataclasses.replace(first, mean=99.0, tolerance=tolerance)
        assert deviations([lax, *others], whole.outputs)[first.name] > 1
    with pytest.raises(UserError, match="version"):
        compare_fingerprints(whole, dataclasses.replace(whole, version=2))

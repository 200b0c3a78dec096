# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every model on a GPU gives what it gives on the CPU: `make gpu` reports the differences.

With GPU_REHEARSAL, the CPU takes the place of the GPU, to test these tests.
"""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks.pretraining_contenders import CONTENDERS, SETTINGS, build
from qbheat_det.api import load, load_detector, load_encoder
from qbheat_det.checkpoint import load_run_config
from qbheat_det.export import export_model
from tests.device.cases import AMP, CASES, DISTILLED, RCNN, draw_data, make_args
from tests.engine.tiny_training import losses, read_opts, start_run

REHEARSAL = "GPU_REHEARSAL" in os.environ
DEVICE = "cpu" if REHEARSAL else "cuda"
if not REHEARSAL:
    pytestmark = [pytest.mark.gpu, pytest.mark.slow]

IMAGE = Path(__file__).resolve().parents[2] / "docs" / "cells.jpg"
DETECTORS = ("retinanet/285M_bccd", "mf_detr/211_285M_bccd")
# Largest relative differences from the CPU in float32: of the losses of four steps, and of all
# weights as one vector.
FLOAT32, HALF = 1e-3, 5e-2
SCORE, BOX = 1e-3, 0.1  # largest differences of a score, and of a box in pixels
HALF_SCORE = 0.05
RUNS = [(case, "bfloat16" if "16" in case else "float32") for case in [*CASES, RCNN]]
RUNS += [
    (case, precision)
    for case in (
        "retinanet",
        "fcos",
        "mf_detr",
        RCNN,
        "qb_heat",
        "moco_v2",
        "supervised",
        DISTILLED,
    )
    for precision in ("bfloat16", "float16")
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """See ``draw_data``."""
    return draw_data(tmp_path_factory.mktemp("data"))


def draw_on_cpu(method, *args, device=None, **options):
    """Calls a function that draws random numbers, which are copied to the device."""
    return method(*args, device="cpu", **options).to(device or "cpu")


@pytest.fixture(autouse=True)
def _as_on_the_cpu(monkeypatch):
    """Float32 is not TF32, and random numbers are those of the CPU."""
    for name in ("rand", "randint", "randperm"):
        monkeypatch.setattr(torch, name, partial(draw_on_cpu, getattr(torch, name)))
    switches = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    yield
    for switch, value in zip(switches, before, strict=True):
        switch.allow_tf32 = value


def find_difference(found, expected):
    """Returns the largest relative difference of the values of two dicts."""
    assert found.keys() == expected.keys()
    return max(abs(found[key] - value) / (abs(value) + 1e-5) for key, value in expected.items())


def read_checkpoint(folder):
    """Returns the last checkpoint, on the CPU."""
    return torch.load(folder / "model_final.pth", "cpu", weights_only=True)


def find_weight_difference(found, expected):
    """Returns the norm of the difference of two checkpoints' weights, relative to the norm."""
    pairs = [(found["model"][key], value) for key, value in expected["model"].items()]
    pairs = [(one.double(), other.double()) for one, other in pairs if other.is_floating_point()]
    distance = sum(float((one - other).square().sum()) for one, other in pairs)
    return (distance / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


@pytest.mark.parametrize(("case", "precision"), RUNS, ids=lambda value: value.replace(", ", "-"))
def test_training(case, precision, data, tmp_path, record_property):
    """Steps, evaluation, feature cache, EMA and resuming."""
    opts, tolerance = {}, FLOAT32
    if precision != "float32":
        tolerance = HALF
        opts = read_opts(f"{AMP} {precision}")
        if "16" in case:
            opts = {}
    if case == DISTILLED and precision == "float32":
        opts = read_opts("SOLVER.AMP.ENABLED False")
    opts |= read_opts("SOLVER.LOG_PERIOD 1")
    gpu, cpu = tmp_path / "gpu", tmp_path / "cpu"
    trainer = start_run(make_args(case, gpu, data, DEVICE, more_opts=opts))
    trainer.train()
    assert {x.device.type for x in trainer.evaluated_model.parameters()} == {DEVICE}
    exact = read_opts("SOLVER.AMP.ENABLED False SOLVER.LOG_PERIOD 1")
    expected = start_run(make_args(case, cpu, data, "cpu", more_opts=exact))
    expected.train()
    assert trainer._last_eval_results.keys() == expected._last_eval_results.keys()
    whole, last = losses(gpu), read_checkpoint(gpu)
    scaler = trainer._trainer.grad_scaler
    if scaler.is_enabled():  # its first steps overflow, and do not change the weights
        found = [find_difference({0: whole[0]}, {0: losses(cpu)[0]})]
        record_property(f"first loss, at most {tolerance:g}", found[0])
    else:
        found = [find_difference(whole, losses(cpu))]
        found.append(find_weight_difference(last, read_checkpoint(cpu)))
        record_property(f"losses, at most {tolerance:g}", found[0])
        record_property(f"weights, at most {tolerance:g}", found[1])

    (gpu / "model_final.pth").unlink()
    (gpu / "last_checkpoint").write_text("model_0000001.pth")
    resumed = start_run(make_args(case, gpu, data, DEVICE, "--resume", more_opts=opts))
    resumed.train()
    again = find_difference(losses(gpu), whole), find_weight_difference(read_checkpoint(gpu), last)
    # The kernels of a GPU may add in any order, and half precision rounds the differences up.
    resume_tolerance = tolerance / 10
    record_property(f"losses after resuming, at most {resume_tolerance:g}", again[0])
    assert scaler.is_enabled() == (trainer._trainer.precision == torch.float16)
    if scaler.is_enabled():
        record_property("gradient scale", scaler.get_scale())
        assert resumed._trainer.grad_scaler.get_scale() == scaler.get_scale()
    assert max(found) <= tolerance
    assert max(again) <= resume_tolerance


def compare_detections(found, expected, score, box, record_property):
    """Asserts that two lists of detections are equal but for rounding."""
    assert len(expected) > 3
    assert len(found) == len(expected)
    scores = (found.scores - expected.scores).abs().max().item()
    boxes = (found.boxes - expected.boxes).abs().max().item()
    record_property(f"scores, at most {score:g}", scores)
    record_property(f"boxes in pixels, at most {box:g}", boxes)
    assert scores <= score
    assert boxes <= box


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "deployed"])
@pytest.mark.parametrize("name", DETECTORS)
def test_prediction(name, fast, record_property):
    expected = load_detector(name, device="cpu").predict(IMAGE)
    found = load_detector(name, device=DEVICE, fast=fast).predict(IMAGE)
    compare_detections(found, expected, SCORE, BOX, record_property)


@pytest.mark.parametrize("name", DETECTORS)
def test_prediction_in_bfloat16(name, record_property):
    expected = load_detector(name, device="cpu").predict(IMAGE, threshold=0.5)
    deployed = load_detector(name, device=DEVICE).deploy(precision="bfloat16")
    found = deployed.predict(IMAGE, threshold=0.5 - HALF_SCORE)
    highest = (found.scores[:3] - expected.scores[:3]).abs().max().item()
    record_property(f"highest scores, at most {HALF_SCORE:g}", highest)
    record_property("boxes, and those of the CPU", f"{len(found)}, {len(expected)}")
    assert highest <= HALF_SCORE
    assert len(found) >= 0.9 * len(expected)


def test_features_of_an_encoder(record_property):
    found = load_encoder("distill/285M", device=DEVICE).embed([IMAGE]).cpu()
    expected = load_encoder("distill/285M", device="cpu").embed([IMAGE])
    difference = 1 - F.cosine_similarity(found, expected).min().item()
    record_property(f"1 - cosine, at most {FLOAT32:g}", difference)
    assert abs(difference) <= FLOAT32


def test_export_of_weights_trained_here(data, tmp_path, record_property):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    args = make_args("retinanet", tmp_path / "run", data, DEVICE)
    trainer = start_run(args)
    trainer.train()
    weights = str(tmp_path / "run" / "model_final.safetensors")
    cfg = load_run_config(weights, device=DEVICE)
    export_model(cfg, tmp_path / "detector.onnx", images=[str(data / "photos")])
    pictures = sorted((data / "photos").iterdir())
    found = load(tmp_path / "detector.onnx", device="cpu").predict(pictures, threshold=0)
    plain = load(weights, device=DEVICE).predict(pictures, threshold=0)
    differences = [
        (one.scores[:5] - other.scores[:5]).abs().max().item()
        for one, other in zip(found, plain, strict=True)
    ]
    record_property(f"scores, at most {SCORE:g}", max(differences))
    assert max(differences) <= SCORE


@pytest.mark.parametrize("name", DETECTORS)
def test_a_compiled_backbone_takes_images_of_any_size(name, record_property):
    backbone = load_detector(name, device=DEVICE).model.backbone
    torch.manual_seed(0)
    images = [torch.randn(2, 3, h, w, device=DEVICE) for h, w in ((128, 192), (192, 160), (96, 96))]
    with torch.no_grad():
        expected = [backbone(x) for x in images]
        torch._dynamo.reset()
        backbone.compile(backend="eager" if REHEARSAL else "inductor")
        found = [backbone(x) for x in images]
    differences = []
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            if isinstance(value, torch.Tensor):
                differences.append(((one[key] - value).norm() / value.norm()).item())
    record_property(f"features, at most {FLOAT32:g}", max(differences))
    assert max(differences) <= FLOAT32


def test_a_compiled_model_has_the_gradients_of_the_plain_one(record_property):
    torch.manual_seed(0)
    model = build(CONTENDERS["285m"], SETTINGS["128"].at(size=64)).to(DEVICE)
    images = torch.randint(256, (8, 3, 64, 64), dtype=torch.uint8, device=DEVICE)

    def compute_gradients():
        torch.manual_seed(0)
        model.zero_grad()
        model([{"image": image} for image in images])["loss_reconstruction"].backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = compute_gradients()
    torch._dynamo.reset()
    model.backbone.compile(backend="eager" if REHEARSAL else "inductor")
    found = compute_gradients()
    distance = sum(float((found[name] - value).square().sum()) for name, value in expected.items())
    norm = sum(float(value.square().sum()) for value in expected.values())
    difference = (distance / norm) ** 0.5
    record_property(f"gradients, at most {FLOAT32:g}", difference)
    assert difference <= FLOAT32

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Deployed models equal the plain ones; which parts compile, and for which images."""

import copy
import pickle
import shutil
from unittest.mock import Mock

import pytest
import torch
from detectron2.modeling import Backbone
from torch import nn
from torch.testing import assert_close

import qbheat_det
from qbheat_det.core import environment
from qbheat_det.core.errors import UserError
from qbheat_det.deployment import compiling
from qbheat_det.deployment.compiling import PartPrograms
from tests.export.tiny_models import build, make_config

SIZES = [(64, 96), (67, 101), (96, 64)]


def deploy(model, **settings):
    """Deploys without changing the memory settings of this process."""
    return qbheat_det.deploy(model, keep_memory=False, **settings)


def entries(*sizes):
    """Returns a batch of random images, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"image": torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8)}
        for size in sizes
    ]


def assert_same_boxes(found, expected):
    """Asserts that two batches of results agree, and are not empty."""
    for one, other in zip(found, expected, strict=True):
        a, b = one["instances"], other["instances"]
        assert len(b) > 0
        assert_close(a.pred_boxes.tensor, b.pred_boxes.tensor, rtol=0, atol=0.05)
        assert_close(a.scores, b.scores, rtol=0, atol=1e-4)
        assert_close(a.pred_classes, b.pred_classes)


@pytest.fixture(scope="module")
def mf_detr():
    return build(make_config("mf_detr"))


@pytest.fixture(scope="module")
def classifier():
    return build(make_config("classifier"))


@pytest.mark.parametrize("kind", ["mf_detr", "selected_queries", "retinanet"])
def test_boxes_equal_the_plain_models_on_odd_sizes_and_in_batches(kind):
    model = build(make_config(kind))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    deployed = deploy(model)
    assert type(deployed.model) is type(model)
    with torch.no_grad():
        for batch in (*([size] for size in SIZES), [SIZES[0]] * 2, SIZES):
            assert_same_boxes(deployed(entries(*batch)), model(entries(*batch)))
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert {step for step, text in deployed.report.items() if not text.startswith("no: ")} == {
        "fold", "fuse", "channels-last",
    }  # fmt: skip


@torch.no_grad()
def test_scores_of_a_classifier_and_maps_of_a_backbone(classifier, mf_detr):
    images = entries((32, 32), (32, 32))
    assert_close(deploy(classifier)(images), classifier(images))
    x = torch.randn(2, 3, 65, 90)
    deployed = deploy(mf_detr.backbone)
    assert_close(dict(deployed(x)), dict(mf_detr.backbone(x)), rtol=1e-4, atol=1e-4)


def test_a_deployed_model_only_predicts_and_can_be_copied(mf_detr):
    deployed = deploy(mf_detr)
    assert not deployed.training
    assert deployed.eval() is deployed
    with pytest.raises(UserError):
        deployed.train()
    with torch.autocast("cpu", torch.bfloat16):  # has no effect
        found = deployed(entries((64, 96)))
    assert not found[0]["instances"].scores.requires_grad
    with torch.no_grad():
        assert_same_boxes(found, mf_detr(entries((64, 96))))

    deployed = deploy(mf_detr, precision="bfloat16")
    image = entries((64, 96))
    for twin in (copy.deepcopy(deployed), pickle.loads(pickle.dumps(deployed))):
        assert_same_boxes(twin(image), deployed(image))


def test_wrong_arguments_and_models_are_refused(classifier):
    for settings, named in (
        ({"precision": "half"}, "precision"),
        ({"compile": "always"}, "compile"),
        *(({"image_sizes": sizes}, "image_sizes") for sizes in ([800, 1333], [(800, 0)], 800)),
    ):
        with pytest.raises(UserError, match=named):
            deploy(classifier, **settings)
    with pytest.raises(UserError, match="Linear"):
        deploy(nn.Linear(2, 2))
    with pytest.raises(UserError):
        deploy(deploy(classifier))


@torch.no_grad()
def test_bfloat16_is_used_only_on_request(classifier, monkeypatch):
    monkeypatch.setattr(environment, "read_cpu_flags", lambda: {"avx512f"})
    assert deploy(classifier).report["precision"].startswith("no: ")
    assert "emulates" in deploy(classifier, precision="bfloat16").report["precision"]
    monkeypatch.setattr(environment, "read_cpu_flags", lambda: {"avx512f", "amx_bf16"})
    assert deploy(classifier).report["precision"].startswith("no: ")  # it is not equal
    deployed = deploy(classifier, precision="bfloat16")
    assert not deployed.report["precision"].startswith("no: ")
    found, expected = (m(entries((32, 32)))[0]["scores"] for m in (deployed, classifier))
    assert found.dtype == torch.float32
    assert_close(found, expected, rtol=0, atol=0.02)
    assert not torch.equal(found, expected)


SIZE, OTHER = (64, 96), (67, 101)


class OneMap(Backbone):
    """A convolution and a norm; a few milliseconds to trace."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x):
        return {"s2": self.norm(self.convolution(x)).relu()}


class TinyModel(nn.Module):
    """Takes and returns what a detector does: for each image the sum of its map."""

    masks_padding = True

    def __init__(self):
        super().__init__()
        self.backbone = OneMap()
        self.pixel_mean = torch.zeros(3)

    def forward(self, inputs):
        if inputs[0]["image"].shape[-1] < 3:
            raise ValueError("too small")
        maps = self.backbone(torch.stack([entry["image"] / 255 for entry in inputs]))
        return [{"sum": image.sum()} for image in maps["s2"]]


@pytest.fixture
def compiled(monkeypatch):
    """Records the shapes to compile for; the part itself runs instead of a program."""
    shapes = []

    def load_or_build(self, args, key, _):
        shapes.append(tuple(args[0].shape))
        self._programs[key] = self._part._call_impl

    monkeypatch.setattr(PartPrograms, "load_or_build", load_or_build)
    return shapes


@torch.no_grad()
def test_named_sizes_compile_once_and_others_run_uncompiled(compiled):
    model = TinyModel()
    deployed = deploy(model, image_sizes=[SIZE])
    assert compiled == [(1, 3, *SIZE)]
    assert not deployed.report["compile"].startswith("no: ")
    for batch in ([SIZE], [OTHER], [SIZE, SIZE], [OTHER, OTHER]):
        assert_close(deployed(entries(*batch)), model(entries(*batch)), rtol=1e-4, atol=1e-2)
    assert len(deployed(entries(SIZE, OTHER))) == 2  # one by one: they cannot be stacked
    with torch.inference_mode():
        deployed(entries(SIZE))
    assert len(compiled) == 1


@torch.no_grad()
def test_a_backbone_compiles_for_one_layout(compiled):
    model, x = OneMap(), torch.randn(1, 3, *SIZE)
    found = deploy(model, image_sizes=[SIZE])(x.contiguous(memory_format=torch.channels_last))
    assert_close(found, model(x), rtol=1e-4, atol=1e-4)
    assert compiled == [(1, 3, *SIZE)]


def test_nothing_compiles_without_sizes_or_if_it_is_off(compiled):
    for settings in ({}, {"compile": "off", "image_sizes": [SIZE]}):
        assert deploy(TinyModel(), **settings).report["compile"].startswith("no: ")
    with pytest.raises(UserError, match="1x2"):  # the model does not take it
        deploy(TinyModel(), image_sizes=[(1, 2)])
    assert not compiled


def test_a_part_that_does_not_compile_runs_uncompiled(monkeypatch):
    refuse = Mock(side_effect=RuntimeError("no such operator\nmore"))
    monkeypatch.setattr(PartPrograms, "load_or_build", refuse)
    model = TinyModel()
    deployed = deploy(model, image_sizes=[SIZE])
    assert deployed.report["compile"].startswith("no: ")
    assert deployed.report["compile"].endswith(": no such operator")
    with torch.no_grad():
        assert_close(deployed(entries(SIZE)), model(entries(SIZE)), rtol=1e-4, atol=1e-2)


def test_a_folder_that_other_users_can_write_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path))
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs").chmod(0o777)
    step = deploy(TinyModel(), image_sizes=[SIZE]).report["compile"]
    assert step.startswith("no: ")
    assert str(tmp_path / "programs") in step


def test_a_fingerprint_depends_on_weights_settings_and_shape():
    part, other = OneMap(), OneMap()
    prints = [PartPrograms(part, torch.float32)._fingerprint(key) for key in (("a",), ("b",))]
    assert PartPrograms(other, torch.float32)._fingerprint(("a",)) == prints[0] != prints[1]
    nn.init.constant_(other.norm.weight, 2.0)
    prints.append(PartPrograms(other, torch.float32)._fingerprint(("a",)))
    part.convolution.padding = (0, 0)
    prints += [PartPrograms(part, d)._fingerprint(("a",)) for d in (torch.float32, torch.bfloat16)]
    assert len(set(prints)) == 5

    for _ in range(2):  # by the function's name, because addresses differ between processes
        part.activation = lambda x: x
        prints.append(PartPrograms(part, torch.float32)._fingerprint(("a",)))
    assert prints[-1] == prints[-2]
    assert len(set(prints)) == 6


def test_outputs_without_order_are_compared_after_sorting():
    queries = torch.randn(1, 100, 4)
    assert compiling._distance([queries.flip(1)], [queries], is_ordered=True) > 0.1
    assert compiling._distance([queries.flip(1)], [queries], is_ordered=False) == 0
    for other in (queries + 1, queries.clone().fill_(torch.nan)):
        assert compiling._distance([other], [queries], is_ordered=False) > 0.1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile with")
@torch.no_grad()
def test_a_compiled_program_is_loaded_by_later_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path))
    model, x = OneMap(), torch.randn(1, 3, *SIZE)
    assert not deploy(model, image_sizes=[SIZE]).report["compile"].startswith("no: ")
    (path,) = (tmp_path / "programs").glob("*.pt2")
    path.write_bytes(path.read_bytes()[:3000])
    assert not deploy(model, image_sizes=[SIZE]).report["compile"].startswith("no: ")
    monkeypatch.setattr(PartPrograms, "_build", lambda *_: pytest.fail("compiled again"))
    path.with_suffix(".lock").unlink()
    path.with_suffix(".lock").mkdir()  # like a read-only folder
    deployed = deploy(model, image_sizes=[SIZE])
    assert not deployed.report["compile"].startswith("no: ")
    assert_close(deployed(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile with")
@torch.no_grad()
def test_a_compiled_detector_gives_the_plain_ones_boxes():
    model = build(make_config("mf_detr"))
    deployed = deploy(model, image_sizes=[SIZE, OTHER])
    assert not deployed.report["compile"].startswith("no: "), str(deployed.report)
    for batch in ([SIZE], [OTHER], [SIZE, SIZE], [SIZE, OTHER], [(96, 96)]):
        assert_same_boxes(deployed(entries(*batch)), model(entries(*batch)))


@pytest.mark.gpu
@torch.no_grad()
def test_results_on_a_gpu_equal_the_plain_ones_with_and_without_graphs():
    model = build(make_config("mf_detr")).cuda()
    images = entries((128, 160))
    expected = model(images)
    for sizes in ([], [(128, 160)]):
        deployed = deploy(model, image_sizes=sizes)
        for _ in range(3):  # a graph is recorded at the second call
            found = deployed(images)
        assert_close(
            found[0]["instances"].scores, expected[0]["instances"].scores, atol=1e-2, rtol=0
        )

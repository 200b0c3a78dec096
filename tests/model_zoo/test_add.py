# Copyright (c) qbheat_det contributors. Apache-2.0.
"""docs/add_to_zoo.py: content of file and index, and that an error changes nothing."""

import datetime
import hashlib
import pickle

import pytest
import torch

import qbheat_det.model_zoo as zoo
from docs import add_to_zoo
from docs.add_to_zoo import add_entry, halve_precision, remove_machine_paths
from qbheat_det.checkpoint import (
    WeightsInfo,
    bare_backbone,
    load_embedded_config,
    read_weights,
    save_weights,
)
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.evaluation.complexity import CountingRule, count_madds
from qbheat_det.model_zoo import Metric, index
from qbheat_det.model_zoo.sources import cache_folder, describe_source
from qbheat_det.modeling.backbone.fpn import build_bare_backbone

from .conftest import BACKBONE, DETECTOR

ORIGIN = {
    "name": BACKBONE,
    "summary": "A tiny Mobile-Former",
    "config": "custom/qb_heat_285M_cpu.yaml",
    "data": "drawn shapes",
    "data_licence": "CC0-1.0",
    "licence": "Apache-2.0",
    "command": "python tools/train_net.py --config-file …",
}


@pytest.fixture
def add(backbone):
    """Adds the tiny backbone."""

    def add_tiny(weights=None, **more):
        origin = {key: more.pop(key) for key in ORIGIN if key in more}
        return add_entry(str(weights or backbone.path), {**ORIGIN, **origin}, **more)

    return add_tiny


def test_only_matrices_are_halved_and_only_if_float16_can_hold_them():
    state = {
        "conv.weight": torch.full((4, 3, 1, 1), 1 / 3),
        "bn.running_var": torch.tensor([1e-9, 1e6]),  # 0 and infinity in float16
        "bn.num_batches_tracked": torch.tensor(7),
        "large": torch.full((2, 2), 7e4),
        "was_half": torch.ones(2, dtype=torch.float16),
    }
    light = halve_precision(state)
    expected = {
        **{name: tensor.float() for name, tensor in state.items()},
        "conv.weight": state["conv.weight"].half(),
        "bn.num_batches_tracked": torch.tensor(7),
    }
    torch.testing.assert_close(light, expected, rtol=0, atol=0)


def test_a_config_loses_paths_of_every_kind_and_keeps_names(backbone):
    cfg = backbone.cfg.clone()
    cfg.MODEL.CLASS_NAMES = ["/", "file: a", ".."]
    cfg.MODEL.CACHE_FEATURES.FOLDER = "private"
    cfg.DATASETS.TRAIN = ("../../me", "shapes")
    cfg.DATASETS.UNLABELLED = ("file:///home/me",)
    cfg.SOLVER.FIRST_STAGE = "\\\\server\\x"
    cfg.INPUT.CLASSIFY.RAND_AUGMENT = [["/home/me"]]
    cfg.DATASETS.TEST = ("a..b", "c/d")
    info = WeightsInfo.from_config(cfg, iteration=7, commit="")
    found = load_embedded_config(remove_machine_paths(info, cfg).config, "it")
    assert found.MODEL.CLASS_NAMES == ["/", "file: a", ".."]
    assert found.DATASETS.TEST == ("a..b", "c/d")
    data, augment = found.DATASETS, found.INPUT.CLASSIFY.RAND_AUGMENT
    paths = (found.MODEL.CACHE_FEATURES.FOLDER, data.TRAIN, data.UNLABELLED, augment)
    assert not any((*paths, found.SOLVER.FIRST_STAGE))


def test_the_file_is_small_and_without_paths_and_the_index_describes_it(add, shipped, backbone):
    metrics = (Metric("kNN top-1", 12.5, "%", "shapes val"),)
    entry = add(metrics=metrics)
    content = (shipped / "qb_heat-tiny.safetensors").read_bytes()
    assert index.list_entries() == (entry,)
    assert entry.metrics == metrics
    assert (entry.sha256, entry.size) == (hashlib.sha256(content).hexdigest(), len(content))
    network = build_bare_backbone(backbone.cfg).eval()
    assert entry.num_params == sum(p.numel() for p in network.parameters())
    madds = count_madds(network, torch.zeros(1, 3, 64, 64)).total(CountingRule.CORE)
    assert (entry.madds, entry.madds_input, entry.task) == (madds, (64, 64), "pretraining")
    assert (entry.date, entry.commit) == (datetime.date.today().isoformat(), "c0ffee1")

    state, info = read_weights(str(shipped / entry.file))
    torch.testing.assert_close(state, halve_precision(backbone.state), rtol=0, atol=0)
    assert not bare_backbone(state)
    assert (info.iteration, info.pixel_format) == (7, backbone.cfg.INPUT.FORMAT)
    assert not any(word in info.config for word in ("someone", "runs", "before"))
    assert info.value_of("OUTPUT_DIR") == get_cfg().OUTPUT_DIR
    found = zoo.get(BACKBONE, device="cpu").state_dict()
    torch.testing.assert_close(
        found, {key: state[key].to(tensor.dtype) for key, tensor in found.items()}
    )
    again = add(summary="another")
    assert index.list_entries() == (again,)
    assert again.summary == "another"


def test_an_error_changes_nothing(add, shipped, tmp_path, monkeypatch):
    pickled = tmp_path / "weights.pth"
    pickled.write_bytes(pickle.dumps({"model": print}))
    monkeypatch.setattr(add_to_zoo, "MAX_SHIPPED", 1000)
    for change, message in (
        ({"config": "custom/none.yaml"}, r"none\.yaml"),
        ({"name": "Retina net"}, "Retina net"),
        ({"weights": pickled}, r"weights\.pth"),
        ({}, "MB"),
    ):
        with pytest.raises(UserError, match=message):
            add(**change)
    assert index.list_entries() == ()
    assert not shipped.exists()


def _ship_encoder(ship, detector, tmp_path, change=0.0):
    """Ships the detector's encoder, alone and with a module that the detector does not use."""
    names = bare_backbone(detector.state)
    state = halve_precision({short: detector.state[name] for name, short in names.items()})
    first = next(iter(state))
    state |= {first: state[first] + change, "expand.more": torch.zeros(3)}
    info = WeightsInfo.from_config(detector.cfg, iteration=1, commit="c0ffee1")
    save_weights(str(tmp_path / "encoder.safetensors"), state, info)
    ship(BACKBONE, (tmp_path / "encoder.safetensors").read_bytes())


def _add(detector):
    return add_entry(str(detector.path), {**ORIGIN, "name": DETECTOR}, encoder=BACKBONE)


def test_the_encoder_is_left_out_and_put_back_to_the_same_bits(ship, shipped, detector, tmp_path):
    _ship_encoder(ship, detector, tmp_path)
    entry = _add(detector)
    assert entry == zoo.find_entry(DETECTOR)
    assert not (shipped / entry.file).exists()
    part = shipped / entry.stored.file
    expected = halve_precision(detector.state)
    names = bare_backbone(expected)
    saved = sum(expected[name].numel() * expected[name].element_size() for name in names)
    assert saved > 10_000
    assert entry.size - part.stat().st_size == pytest.approx(saved, rel=0.05)
    assert describe_source(entry) == "shipped"

    found, _ = read_weights(zoo.get_checkpoint(DETECTOR))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    (cache_folder(entry) / entry.file).unlink()
    part.write_bytes(part.read_bytes().replace(b"square", b"circle"))
    with pytest.raises(UserError, match=part.name):
        zoo.get_checkpoint(DETECTOR)
    with pytest.raises(UserError, match=DETECTOR):  # it has no encoder for others
        add_entry(str(detector.path), {**ORIGIN, "name": "retinanet/other"}, encoder=DETECTOR)


def test_another_encoder_is_refused(ship, shipped, detector, tmp_path):
    _ship_encoder(ship, detector, tmp_path, change=0.5)
    before = index.INDEX_FILE.read_bytes()
    with pytest.raises(UserError, match=r"qb_heat-tiny\.safetensors"):
        _add(detector)
    assert index.INDEX_FILE.read_bytes() == before
    assert [path.name for path in shipped.iterdir()] == ["qb_heat-tiny.safetensors"]

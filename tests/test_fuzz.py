# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Damaged files are refused with a sentence: a short run of ``make fuzz``, and known attacks."""

import json
import time
import zipfile
import zlib
from collections import Counter

import pytest
import yaml

from qbheat_det.checkpoint.run_config import load_embedded_config
from qbheat_det.core.errors import UserError, refuse_unreadable
from qbheat_det.data import open_source

from . import fuzz
from .data.format_cases import write_coco, write_yolo


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("seed", ["short", pytest.param("longer", marks=pytest.mark.slow)])
def test_no_reader_fails_on_damaged_files(seed, tmp_path, monkeypatch):
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / "cache"))
    num_cases = len(fuzz.READERS) * {"short": 5, "longer": 60}[seed]
    counts = Counter()
    for case, result, message in fuzz.fuzz(list(fuzz.READERS), num_cases, 300, seed, tmp_path):
        assert result != "fault", f"{case}: {message}"
        counts[result] += 1
    assert counts.total() == num_cases
    assert min(counts["ok"], counts["refused"]) > num_cases / 10  # both sides are reached


@pytest.mark.parametrize(
    "fault", [KeyError("a"), OSError(36, "too long"), zlib.error("x"), RecursionError(), EOFError()]
)
def test_every_type_of_error_names_the_file(fault):
    name = rf"'a\.json'.*{type(fault).__name__}"
    with pytest.raises(UserError, match=name) as refused, refuse_unreadable("a.json"):
        raise fault
    assert refused.value.__cause__ is fault
    with pytest.raises(UserError, match=r"^as it is$"), refuse_unreadable("a.json"):
        raise UserError("as it is")


def test_long_integers_name_their_label_file(tmp_path):
    write_coco(tmp_path / "coco")
    (path,) = (tmp_path / "coco").rglob("*.json")
    content = json.loads(path.read_text())
    content["images"][0]["width"] = "WIDTH"
    path.write_text(json.dumps(content).replace('"WIDTH"', "9" * 5000))
    with pytest.raises(UserError, match=rf"{path}.*4300 digits"):
        open_source(str(path))


@pytest.mark.parametrize("entry", ["a/" * 50_000, "[" * 100_000, "*" * 100_000])
def test_no_time_is_spent_on_paths_that_cannot_exist(entry, tmp_path):
    write_yolo(tmp_path)
    path = tmp_path / "data.yaml"
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**content, "train": entry}))
    start = time.monotonic()
    with pytest.raises(UserError, match=r"data\.yaml': train is too long"):
        open_source(str(tmp_path))
    assert time.monotonic() - start < 5


def test_a_damaged_zip_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / "cache"))
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):
        path = tmp_path / f"{method}.zip"
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("a.txt", bytes(range(256)) * 40)
        content = bytearray(path.read_bytes())
        start = 30 + len("a.txt")  # of the compressed bytes
        content[start : start + 40] = b"\xff" * 40
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{method}\.zip' cannot be read"):
            open_source(str(path))


@pytest.mark.parametrize("text", ["a: &a [*a]", "SEED: \ud800", "SEED: 2026-13-01", "[" * 10**5])
def test_configs_inside_files_of_strangers_name_their_file(text):
    with pytest.raises(UserError, match=r"the config inside 'w\.onnx'"):
        load_embedded_config(text, "the config inside 'w.onnx'")

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The wheel and the weights in it, and the Detectron2 versions that it runs with."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from detectron2.modeling import Backbone, build_model

import qbheat_det
from docs.add_to_zoo import MAX_SHIPPED, describe_model
from qbheat_det.config import get_config_path, load_config
from qbheat_det.model_zoo import list_entries
from qbheat_det.model_zoo.sources import SHIPPED, fetch, open_trained
from tests.model_zoo import fingerprints

ROOT = Path(__file__).resolve().parents[1]
# main's model_zoo still imports pkg_resources; v0.6 imports _C unguarded, main guards it.
IMPORT_ALL = """
import importlib.util, pathlib, sys, types
sys.modules["pkg_resources"] = None
sys.modules["detectron2.model_zoo"] = None
sys.modules["detectron2._C"] = types.ModuleType("detectron2._C")  # not one compiled operator
sys.path.insert(0, sys.argv[1])
import qbheat_det
folder = pathlib.Path(qbheat_det.__file__).parent
for path in sorted(folder.rglob("*.py")):
    if {folder / "configs", folder / "tools"} & {*path.parents}:
        continue  # scripts
    if path == folder / "app" / "page.py" and not importlib.util.find_spec("gradio"):
        continue  # the extra app
    parts = path.relative_to(folder.parent).with_suffix("").parts
    importlib.import_module(".".join(parts).removesuffix(".__init__"))
print(folder)
print(qbheat_det.config.get_config_path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the checkout: links would let a build write into it."""
    folder = tmp_path_factory.mktemp("source")
    for name in (
        *("qbheat_det", "configs", "tools", "tests", "setup.py", "pyproject.toml"),
        *("LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "Makefile"),
    ):
        subprocess.run(["cp", "-r", ROOT / name, folder / name], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """Builds the wheel without isolation and without the network."""
    scratch = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "-q"]
    command += ["--no-build-isolation", "-w", str(scratch), str(source)]
    # pip refuses a caller's PIP_BUILD_CONSTRAINT beside --no-build-isolation.
    env = {name: value for name, value in os.environ.items() if "CONSTRAINT" not in name}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (path,) = scratch.glob("qbheat_det-*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    """Builds the source archive."""
    scratch = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "-q", "sdist", "-d", str(scratch)]
    run = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (path,) = scratch.glob("qbheat_det-*.tar.gz")
    return path


def files_below(folder):
    """Paths relative to the folder's parent, without what Python leaves behind."""
    return {
        path.relative_to(folder.parent).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_package_its_configs_and_its_metadata_are_all_that_is_inside(wheel):
    found = set(zipfile.ZipFile(wheel).namelist())
    folders = files_below(ROOT / "configs") | files_below(ROOT / "tools")
    expected = {f"qbheat_det/{name}" for name in folders}
    expected |= files_below(ROOT / "qbheat_det")
    assert "qbheat_det/py.typed" in expected
    assert expected <= found
    name = f"qbheat_det-{qbheat_det.__version__}"
    tops = {path.split("/")[0] for path in found}
    assert tops == {"qbheat_det", f"{name}.dist-info", f"{name}.data"}  # the last has the command


@pytest.mark.slow
def test_unpacked_it_imports_without_what_one_detectron2_has_alone_and_finds_a_config(
    wheel, tmp_path
):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    name = sorted(path.relative_to(ROOT / "configs") for path in ROOT.glob("configs/**/*.yaml"))[0]
    command = [sys.executable, "-c", IMPORT_ALL, str(tmp_path), str(name)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr
    package, config = map(Path, run.stdout.split())
    assert package.samefile(tmp_path / "qbheat_det")
    assert config.samefile(package / "configs" / name)


def lowest_versions():
    """Returns constraints that pin each requirement of setup.py to its minimum."""
    text = (ROOT / "setup.py").read_text().split("install_requires=[")[1].split("]")[0]
    return "\n".join(re.sub(">=", "==", line) for line in re.findall(r'"([^"]+>=[^"]+)"', text))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "versions"), [("wheel", "newest"), ("sdist", "committed"), ("wheel", "lowest")]
)
def test_an_archive_alone_says_how_to_get_detectron2_and_then_predicts(
    kind, versions, tmp_path, request
):
    archive = request.getfixturevalue(kind)
    bin_folder = tmp_path / "venv" / "bin"
    constraints = tmp_path / "constraints.txt"
    texts = {
        "newest": "",
        "committed": (ROOT / "constraints.txt").read_text(),
        "lowest": lowest_versions(),
    }
    constraints.write_text(texts[versions])
    drop = ("PYTHON", "VIRTUAL_ENV", "PIP_CONSTRAINT")
    env = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    env |= {"PIP_CONSTRAINT": str(constraints), "QBHEAT_CACHE": str(tmp_path / "cache")}

    def run(*command):
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    try:
        assert run(sys.executable, "-m", "venv", "venv").returncode == 0
        installed = run(bin_folder / "pip", "install", "-q", f"{archive}[eval,export,opencv]")
        assert installed.returncode == 0, installed.stderr
        assert "`qbheat setup`" in run(bin_folder / "python", "-c", "import qbheat_det").stderr
        setup = run(bin_folder / "qbheat", "setup")
        assert setup.returncode == 0, setup.stderr
        image = ROOT / "docs" / "cells.jpg"
        predicted = run(
            *(bin_folder / "qbheat", "predict", "--weights", "retinanet/285M_bccd"),
            *("--images", image, "--json", tmp_path / "boxes.json"),
        )
        assert predicted.returncode == 0, predicted.stderr
        assert json.loads((tmp_path / "boxes.json").read_text())
        assert run(bin_folder / "qbheat", "doctor").returncode == 0
    finally:
        shutil.rmtree(tmp_path / "venv", ignore_errors=True)  # 6 GB


ENTRIES = [entry for entry in list_entries() if entry.distribution is None]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_shipped_entry_gives_the_outputs_that_were_measured(entry, monkeypatch):
    monkeypatch.delenv("QBHEAT_ZOO", raising=False)
    trained = open_trained(str(fetch(entry)), device="cpu")
    for field, value in describe_model(trained).items():
        assert getattr(entry, field) == value
    expected = json.loads(fingerprints.FILE.read_text())[entry.name]
    found = fingerprints.compute_fingerprint(trained.model, trained.cfg)
    assert fingerprints.find_differences(expected, found) == []
    if entry == ENTRIES[0]:  # two gray levels are found
        trained.model.pixel_mean.add_(2.0)
        changed = fingerprints.compute_fingerprint(trained.model, trained.cfg)
        assert fingerprints.find_differences(expected, changed)


def test_every_shipped_file_is_an_entrys_and_all_together_are_small():
    files = {path.name: path.stat().st_size for path in SHIPPED.iterdir()}
    stored = [entry.stored for entry in ENTRIES]
    assert files == {entry.file: entry.size for entry in stored}
    assert sum(files.values()) <= MAX_SHIPPED


def small(name):
    """Returns a shipped config on the CPU with the smallest decoder."""
    cfg = load_config(get_config_path(name), ["MODEL.DEVICE", "cpu"])
    cfg.MODEL.MF_DETR.NUM_BLOCKS = [1, 1, 1]
    return cfg


@pytest.mark.parametrize(
    "name", ["coco/mf_detr_211_285M_probe.yaml", "coco/retinanet_285M_probe.yaml"]
)
def test_detectors_work_with_and_without_padding_constraints(name, monkeypatch):
    # main's detectors read this property of the backbone, v0.6 has none.
    batch = [{"image": torch.rand(3, 70, 96) * 255}, {"image": torch.rand(3, 64, 50) * 255}]
    model = build_model(small(name)).eval()
    monkeypatch.delattr(Backbone, "padding_constraints", raising=False)
    with torch.no_grad():
        without = model.preprocess_image(batch).tensor
        outputs = model(batch)
    monkeypatch.setattr(Backbone, "padding_constraints", property(lambda _: {}), raising=False)
    with torch.no_grad():
        torch.testing.assert_close(model.preprocess_image(batch).tensor, without)
        for one, other in zip(model(batch), outputs, strict=True):
            boxes, expected = one["instances"].pred_boxes, other["instances"].pred_boxes
            torch.testing.assert_close(boxes.tensor, expected.tensor)


def test_without_detectron2_the_error_names_the_two_ways(monkeypatch):
    from qbheat_det.core.environment import require_detectron2

    require_detectron2()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"`qbheat setup`.*pip install.*git\+"):
        require_detectron2()


def test_each_shipped_weights_file_has_its_licence_on_the_page():
    page = (ROOT / "docs" / "licenses.md").read_text("utf-8")
    assert not [
        path.name for path in SHIPPED.iterdir() if f"| `{path.name}` | Apache-2.0" not in page
    ]
    assert {entry.licence for entry in ENTRIES} == {"Apache-2.0"}

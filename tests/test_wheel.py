# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The wheel and the weights in it, and the Detectron2 versions that it runs with."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone, build_model

from qbheat_det.config import get_config_path, load_config
from qbheat_det.model_zoo import ZooEntry, load_index
from qbheat_det.model_zoo.add import MAX_SHIPPED
from qbheat_det.model_zoo.sources import SHIPPED
from qbheat_det.model_zoo.verify import verify_entry

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
        continue  # read by LazyConfig and run as scripts
    if path == folder / "app" / "page.py" and not importlib.util.find_spec("gradio"):
        continue  # the extra app
    parts = path.relative_to(folder.parent).with_suffix("").parts
    importlib.import_module(".".join(parts).removesuffix(".__init__"))
print(folder)
print(qbheat_det.config.get_config_path(sys.argv[2]))
from detectron2.config import LazyConfig
for name in sys.argv[3:]:
    LazyConfig.load(qbheat_det.config.get_config_path(name)).model
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy of the checkout, without isolation and without the network."""
    scratch = tmp_path_factory.mktemp("wheel")
    source = scratch / "source"
    source.mkdir()
    for name in (
        "qbheat_det",
        "configs",
        "tools",
        "setup.py",
        "pyproject.toml",
        "LICENSE",
        "MANIFEST.in",
    ):
        # Links would let the build write into the checkout.
        subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "-q"]
    command += ["--no-build-isolation", "-w", str(scratch), str(source)]
    # pip refuses a caller's PIP_BUILD_CONSTRAINT beside --no-build-isolation.
    env = {name: value for name, value in os.environ.items() if "CONSTRAINT" not in name}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (path,) = scratch.glob("qbheat_det-*.whl")
    return path


def files_below(folder: Path) -> set[str]:
    """Paths relative to the folder's parent, without what Python leaves behind."""
    return {
        path.relative_to(folder.parent).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_package_its_configs_and_its_metadata_are_all_that_is_inside(wheel: Path) -> None:
    found = set(zipfile.ZipFile(wheel).namelist())
    folders = files_below(ROOT / "configs") | files_below(ROOT / "tools")
    expected = {f"qbheat_det/{name}" for name in folders}
    expected |= files_below(ROOT / "qbheat_det")
    assert "qbheat_det/py.typed" in expected
    assert expected <= found
    name = "qbheat_det-0.1.0"
    tops = {path.split("/")[0] for path in found}
    assert tops == {"qbheat_det", f"{name}.dist-info", f"{name}.data"}  # the last has the command


@pytest.mark.slow
def test_unpacked_it_imports_without_what_one_detectron2_has_alone_and_finds_a_config(
    wheel: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    name = sorted(path.relative_to(ROOT / "configs") for path in ROOT.glob("configs/**/*.yaml"))[0]
    lazy = [str(path.relative_to(ROOT / "configs")) for path in ROOT.glob("configs/lazy/**/*.py")]
    assert lazy
    command = [sys.executable, "-c", IMPORT_ALL, str(tmp_path), str(name), *lazy]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr
    package, config = map(Path, run.stdout.split())
    assert package.samefile(tmp_path / "qbheat_det")
    assert config.samefile(package / "configs" / name)


ENTRIES = [entry for entry in load_index() if entry.distribution is None]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_shipped_entry_is_verified_on_this_machine(
    entry: ZooEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QBHEAT_ZOO", raising=False)
    assert (SHIPPED / entry.stored.file).is_file()
    assert verify_entry(entry)["error"] == ""


def test_every_shipped_file_is_an_entrys_and_all_together_are_small() -> None:
    files = {path.name: path.stat().st_size for path in SHIPPED.iterdir()}
    stored = [entry.stored for entry in ENTRIES]
    assert files == {entry.file: entry.size for entry in stored}
    assert sum(files.values()) <= MAX_SHIPPED


def small(name: str) -> CfgNode:
    """Returns a shipped config on the CPU with the smallest decoder."""
    cfg = load_config(get_config_path(name), ["MODEL.DEVICE", "cpu"])
    cfg.MODEL.MF_DETR.NUM_BLOCKS = [1, 1, 1]
    return cfg


@pytest.mark.parametrize(
    "name", ["coco/mf_detr_211_285M_probe.yaml", "coco/retinanet_285M_probe.yaml"]
)
def test_detectors_work_with_and_without_padding_constraints(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_without_detectron2_the_error_names_the_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    from qbheat_det.core.environment import require_detectron2

    require_detectron2()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"tools/install_detectron2\.py.*pip install.*git\+"):
        require_detectron2()

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/wheelhouse.py: which wheels a machine needs, and that they install without a network."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.tool_modules import load_tool

tool = load_tool("wheelhouse")
ROOT = Path(__file__).resolve().parents[2]
OLD = tool.Target("3.10", "manylinux_2_28_aarch64", {"torch": "2.11.0+cu130"})
# What is usually there, on machines with PyTorch.
HAS = ("torch", "torchvision", "numpy", "scipy", "pillow", "matplotlib", "opencv-python-headless")
HAS += ("tensorboard", "PyYAML", "Jinja2", "huggingface-hub")


def wheel(name, version="1.0", requires=()):
    return tool.Wheel(Path(f"{name}.whl"), name, version, [*map(Requirement, requires)])


def test_what_a_machine_has_is_read_from_names_and_from_pip_freeze(tmp_path, capsys):
    committed = {"numpy": "2.4.6"}
    found = tool.read_installed("torch==2.11,NumPy", committed)
    assert found == {"torch": "2.11", "numpy": "2.4.6"}
    assert "numpy: no version" in capsys.readouterr().out
    frozen = tmp_path / "freeze.txt"
    frozen.write_text(
        "torch==2.11.0+cu130\n# a comment\n-e git+ssh://x#egg=y\nOf.Mine @ file:///mine  # here\n"
    )
    assert tool.read_installed(str(frozen), committed) == {"torch": "2.11.0+cu130"}
    assert "of-mine: no version" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--python python3.12", "python3.12"),
        ("--platform linux_x86_64", "linux_x86_64"),
        ("--has gone.txt", "gone.txt"),
        ("--has torch=2.11", "torch=2.11"),
        ("--has torch==new", "torch==new"),
    ],
)
def test_flags_that_describe_no_machine_are_refused(flags, named, capsys):
    assert tool.main(flags.split()) == 2
    assert named in capsys.readouterr().err


def test_the_newest_platform_comes_first_and_older_names_are_there():
    found = tool.list_platforms("manylinux_2_18_aarch64")
    assert found[:3] == [f"manylinux_2_{n}_aarch64" for n in (18, 17)] + ["manylinux2014_aarch64"]
    assert found[-1] == "linux_aarch64"


def test_markers_are_those_of_the_machine_and_extras_those_that_were_asked_for():
    wheels = [
        wheel("ours", requires=["torch>=2", "b[fast]", "d; extra == 'draw'", "e; extra == 'no'"]),
        wheel("b", requires=["tomli; python_version < '3.11'", "f; extra == 'fast'"]),
        wheel("f", requires=["b", "g; platform_machine == 'x86_64'"]),
        wheel("here", requires=[]),
    ]
    needed, missing = tool.find_needed(["ours[draw]"], wheels, OLD)
    assert {each.name for each in needed} == {"ours", "b", "f"}
    assert {each.name for each in missing} == {"tomli", "d"}


def test_what_is_too_old_is_replaced_but_never_pytorch(capsys):
    target = OLD._replace(has={"torch": "2.11.0a0+nv", "timm": "1.0.1", "numpy": "2.0"})
    ours = wheel("ours", requires=["torch>=2.6", "timm>=1.0.31", "numpy>=1; extra == 'a'"])
    assert set(tool.remove_unfit(target, [ours], []).has) == {"torch", "numpy"}
    assert "timm 1.0.1 does not fit ours" in capsys.readouterr().out
    with pytest.raises(tool.InstallError, match=r"torch 2\.11.*torch>=2\.12"):
        tool.remove_unfit(target, [wheel("ours", requires=["torch>=2.12"])], [])


def link_distributions(names, site):
    """Links distributions of this Python, and all that they require, into a site folder."""
    todo, linked, seen = [*map(Requirement, names)], {}, set()
    while todo:
        wanted = todo.pop()
        if (wanted.name, *wanted.extras) in seen:
            continue
        seen.add((wanted.name, *wanted.extras))
        distribution = importlib.metadata.distribution(wanted.name)
        linked[tool.canonicalize_name(wanted.name)] = distribution.version
        for file in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
            if not (site / file).exists():
                (site / file).symlink_to(distribution.locate_file(file))
        for requirement in map(Requirement, distribution.requires or []):
            marker, extras = requirement.marker, ("", *wanted.extras)
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(requirement)
    return linked


@pytest.mark.slow
def test_wheels_install_and_predict_on_a_machine_without_a_network(tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    linked = link_distributions(HAS, site)
    frozen = tmp_path / "freeze.txt"
    frozen.write_text("".join(f"{name}=={version}\n" for name, version in linked.items()))
    folder = tmp_path / "wheelhouse"
    make = [sys.executable, ROOT / "tools" / "wheelhouse.py", "--has", frozen, "--output", folder]
    made = subprocess.run(make, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    assert sum(path.stat().st_size for path in folder.iterdir()) < 40e6

    off_the_network = []
    if shutil.which("unshare") and not subprocess.call(["unshare", "-rn", "true"]):
        off_the_network = ["unshare", "-rn"]
    drop = ("PYTHON", "VIRTUAL_ENV", "PIP_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    nowhere = "http://127.0.0.1:9"
    env |= {"http_proxy": nowhere, "https_proxy": nowhere, "PIP_CONFIG_FILE": os.devnull}
    env |= {"QBHEAT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def run(*command):
        done = subprocess.run(
            [*off_the_network, *command],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    scripts = tmp_path / "venv" / "bin"
    command = made.stdout.splitlines()[-1].split()
    assert command[:2] == ["pip", "install"]
    run(scripts / command[0], *command[1:])
    assert "No broken requirements" in run(scripts / "pip", "check")
    run(scripts / "qbheat", "predict", "--weights", "retinanet/285M_bccd", "--images",
        ROOT / "docs" / "cells.jpg", "--json", "boxes.json")  # fmt: skip
    assert json.loads((tmp_path / "boxes.json").read_text())
    version = run(scripts / "python", "-c", "import torch; print(torch.__file__)")
    assert Path(version.strip()).is_relative_to(site)

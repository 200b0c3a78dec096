# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/doctor.py and tools/install_detectron2.py: what they recognise, advise and install."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.tool_modules import TOOLS, load_tool

doctor = load_tool("doctor")


class Imports:
    """Stands in for ``importlib.import_module``; errors are raised, the rest is imported."""

    def __init__(self, **replaced):
        self.replaced = {name.replace("__", "."): value for name, value in replaced.items()}

    def __call__(self, name):
        found = self.replaced.get(name) or importlib.import_module(name)
        if isinstance(found, Exception):
            raise found
        return found


def test_a_bare_python_gets_the_commands_and_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run = subprocess.run([python, TOOLS / "doctor.py"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "")
    for words in ("! torch ", f"{python} -m pip install", "install_detectron2.py"):
        assert words in run.stdout


def test_this_environment_has_all_that_is_required(capsys):
    code = doctor.main([])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert f"torch                   {torch.__version__}\n" in printed
    assert "compiled ops" in printed
    findings = [doctor.Finding("b", "gone", "get b"), doctor.check_python((3, 9, 1))]
    assert doctor.report(findings[:1]) == 0
    assert doctor.report(findings) == 1


def test_a_cpu_build_of_torch_beside_torchvision_is_recognised():
    cpu = SimpleNamespace(
        __version__="2.13.0+cpu",
        get_num_threads=lambda: 2,
        cuda=SimpleNamespace(device_count=lambda: 0),
    )
    error = RuntimeError("operator torchvision::nms does not exist")
    findings = {one.name: one for one in doctor.check_torch(Imports(torch=cpu, torchvision=error))}
    assert findings["torchvision"].required
    # Installing alone would find torch already there.
    uninstall, install = findings["torchvision"].command.split(" && ")
    assert uninstall.endswith("pip uninstall -y torch torchvision")
    assert install.endswith("torch torchvision")


@pytest.mark.parametrize(
    ("module", "error", "command"),
    [
        ("detectron2", ModuleNotFoundError(name="detectron2"), "tools/install_detectron2.py"),
        ("detectron2__layers", ModuleNotFoundError(name="fvcore"), " fvcore"),
        ("detectron2__layers", ImportError("undefined symbol"), "uninstall -y detectron2 &&"),
    ],
)
def test_detectron2_gets_the_command_that_mends_it(module, error, command):
    (finding,) = doctor.check_detectron2(Imports(**{module: error}))
    assert finding.required
    assert command in finding.command


tool = load_tool("install_detectron2")


def test_an_archive_yields_its_regular_files_and_no_links(tmp_path):
    path = tmp_path / "sdist.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("top/detectron2/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        outside = tarfile.TarInfo("top/../../outside.py")
        outside.size = 1
        archive.addfile(outside, io.BytesIO(b"1"))
        inside = tarfile.TarInfo("top/detectron2/inside.py")
        inside.size = 2
        archive.addfile(inside, io.BytesIO(b"22"))
        project = tarfile.TarInfo("top/projects/PointRend/point_rend/a.py")
        archive.addfile(project, io.BytesIO(b""))
    files = tool.read_sdist(path, hashlib.sha256(path.read_bytes()).hexdigest())
    assert files["detectron2/inside.py"] == b"22"
    assert "detectron2/link.py" not in files
    # What would climb out of the archive is not below a folder that is installed; projects move
    # below the package, as in upstream's setup.
    assert set(tool.adapt(files, ())) == {
        "detectron2/inside.py",
        "detectron2/projects/point_rend/a.py",
        "detectron2/_C.py",
    }


def test_an_adaptation_replaces_whole_names_and_says_so_in_the_file():
    old = "a = np.int(1) + np.int64(2)\n"
    rule = tool.Adaptation("a.py", r"\bnp\.int\b", "int", 1)
    package = tool.adapt({"detectron2/a.py": old.encode(), "setup.py": b""}, [rule])
    first, *rest = package["detectron2/a.py"].decode().splitlines()
    assert first == "a = int(1) + np.int64(2)"
    assert rest[0].startswith("# Changed by")
    assert "setup.py" not in package


def test_coco_evaluation_is_not_the_compiled_one_by_default():
    name = "evaluation/coco_evaluation.py"
    spec = importlib.util.find_spec("detectron2.evaluation")
    installed = Path(spec.origin).with_name("coco_evaluation.py").read_text(encoding="utf-8")
    upstream = installed.partition("# Changed by")[0].replace("impl=False", "impl=True")
    rules = [rule for rule in tool.ADAPTATIONS if rule.path == name]
    adapted = tool.adapt({f"detectron2/{name}": upstream.encode()}, rules)
    namespace = {"__name__": "detectron2.evaluation.coco_evaluation"}
    exec(compile(adapted[f"detectron2/{name}"], name, "exec"), namespace)
    for function in (namespace["COCOEvaluator"], namespace["_evaluate_predictions_on_coco"]):
        assert inspect.signature(function).parameters["use_fast_impl"].default is False


def test_names_that_projects_of_main_import_are_added():
    old = {
        "solver/lr_scheduler.py": "import math\nimport torch\nfrom fvcore import nn\n",
        "solver/__init__.py": "from .lr_scheduler import WarmupCosineLR, LRMultiplier, Warmup\n",
        "engine/hooks.py": "lr_scheduler._LRScheduler lr_scheduler._LRScheduler\n",
        "export/__init__.py": "from .api import *\nfrom .flatten import TracingAdapter\n",
    }
    files = {f"detectron2/{path}": text.encode() for path, text in old.items()}
    rules = [rule for rule in tool.ADAPTATIONS if rule.path in old]
    package = tool.adapt(files, rules)
    texts = [package[name].decode().partition("# Changed")[0] for name in files]
    assert texts == [
        "import math\nimport torch\nfrom torch.optim.lr_scheduler import LRScheduler\n"
        "from fvcore import nn\n",
        "from .lr_scheduler import WarmupCosineLR, LRMultiplier, LRScheduler, Warmup\n",
        "lr_scheduler.LRScheduler lr_scheduler.LRScheduler\n",
        "try:\n    from .api import *\nexcept ImportError:\n    pass\n"
        "from .flatten import TracingAdapter\n",
    ]


@pytest.mark.parametrize(("file", "times"), [("a.py", 0), ("a.py", 2), ("gone.py", 1)])
def test_an_adaptation_that_applies_another_number_of_times_is_an_error(file, times):
    with pytest.raises(tool.InstallError, match=file):
        tool.adapt({"detectron2/a.py": b"old"}, [tool.Adaptation(file, "old", "new", times)])


def test_the_wheel_installs_as_a_distribution_that_pip_can_remove(tmp_path):
    wheel = tool.build_wheel({"detectron2/a.py": b"A = 1\n"}, b"the licence", tmp_path)
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    (found,) = importlib.metadata.distributions(name="detectron2", path=[str(target)])
    assert found.version == tool.VERSION
    assert "torch>=1.8" in (found.requires or [])
    assert (target / "detectron2" / "a.py").read_text() == "A = 1\n"
    licence = target / f"detectron2-{tool.VERSION}.dist-info" / "licenses" / "LICENSE"
    assert licence.read_text() == "the licence"


def test_an_archive_with_another_hash_is_refused_before_it_is_opened(tmp_path):
    wrong = tmp_path / "not-even-an-archive.tar.gz"
    wrong.write_bytes(b"anything")
    with pytest.raises(tool.InstallError, match=str(wrong)):
        tool.read_sdist(wrong)


@pytest.mark.parametrize(("error", "code"), [("", 0), ("undefined symbol: foo", 2)])
def test_an_installed_detectron2_is_never_replaced(error, code, monkeypatch, capsys):
    monkeypatch.setattr(tool, "find_installed", lambda: tool.Installed("0.6", "/built/here", error))
    monkeypatch.setattr(tool, "run_pip", lambda *_: pytest.fail("pip was run"))
    assert tool.main([]) == code
    captured = capsys.readouterr()
    assert (error or "/built/here") in captured.out + captured.err


def test_an_empty_folder_is_no_installation_and_a_broken_one_is_found_with_its_error(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    (tmp_path / "detectron2").mkdir()
    (site / "detectron2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert tool.find_installed(python) is None
    (site / "detectron2" / "__init__.py").write_text("import torch_of_another_version\n")
    found = tool.find_installed(python)
    assert found.version == "of unknown version"
    assert Path(found.path).samefile(site / "detectron2")
    assert "No module named 'torch_of_another_version'" in found.error

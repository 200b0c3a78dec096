# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Installs Detectron2 without git or a compiler.

If this Python already has Detectron2 (a build of yours, or the official main), nothing changes.
Otherwise, downloads the Python part of the official release v0.6 from the package index, checks its
SHA-256, adapts it to current Pillow, NumPy, setuptools and PyTorch, and installs it as a
distribution named detectron2, so that `pip uninstall detectron2` works.

Nothing is compiled, so Detectron2's own deformable convolution, rotated boxes and fast COCO
evaluation are missing. If you need them, build the official Detectron2:

    pip install --no-build-isolation 'git+https://github.com/facebookresearch/detectron2.git'
"""

import base64
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from arguments import make_parser

SDIST = "pb1-detectron2"  # name on the index; Python files as in Detectron2's tag v0.6
SHA256 = "5d2e9e51e523ec72f6a31cca04b0a515492e9514b773a3d134cedc0677170b29"
VERSION = "0.6+pure"  # the local label marks it as unofficial

# Upstream's requirements, with three changes. Pins that pip can no longer satisfy are relaxed
# (black==21.4b2, iopath<0.1.10) or taken from main (omegaconf<2.4, for hydra-core). future and
# pydot, which only the Caffe2 export uses, are left out. torch and torchvision are named.
REQUIRES = (
    *("torch>=1.8", "torchvision", "numpy", "Pillow>=7.1", "matplotlib", "pycocotools>=2.0.2"),
    *("termcolor>=1.1", "yacs>=0.1.8", "tabulate", "cloudpickle", "tqdm>4.29.0", "tensorboard"),
    *("fvcore>=0.1.5,<0.1.6", "iopath>=0.1.7", "omegaconf>=2.1,<2.4", "hydra-core>=1.1", "black"),
)

# Maps folders of the source archive to the folders where upstream's setup.py installs them.
PACKAGES = {
    "detectron2/": "detectron2/",
    "projects/PointRend/point_rend/": "detectron2/projects/point_rend/",
    "projects/DeepLab/deeplab/": "detectron2/projects/deeplab/",
    "projects/Panoptic-DeepLab/panoptic_deeplab/": "detectron2/projects/panoptic_deeplab/",
}


class Adaptation(NamedTuple):
    """A replacement in one file, and the number of times it must apply."""

    path: str
    old: str  # regular expression
    new: str
    times: int


ADAPTATIONS = (
    # Pillow 10 has no Image.LINEAR.
    Adaptation("data/transforms/transform.py", r"\bImage\.LINEAR\b", "Image.BILINEAR", 1),
    # NumPy 1.24 has no np.int, np.float, np.str; np.bool meant the builtin until then.
    Adaptation("data/build.py", r"\bnp\.int\b", "int", 2),
    Adaptation("data/datasets/pascal_voc.py", r"\bnp\.str\b", "str", 1),
    Adaptation("evaluation/pascal_voc_evaluation.py", r"\bnp\.bool\b", "bool", 2),
    Adaptation("evaluation/sem_seg_evaluation.py", r"\bnp\.int\b", "int", 2),
    Adaptation("evaluation/sem_seg_evaluation.py", r"\bnp\.float\b", "float", 5),
    Adaptation("structures/masks.py", r"\bnp\.bool\b", "bool", 3),
    Adaptation("utils/video_visualizer.py", r"\bnp\.bool\b", "bool", 1),
    Adaptation("utils/visualizer.py", r"\bnp\.bool\b", "bool", 3),
    # The fast COCO evaluation is compiled. As the default, it would fail after the training.
    Adaptation(
        "evaluation/coco_evaluation.py", r"\buse_fast_impl=True\b", "use_fast_impl=False", 2
    ),
    # setuptools 82 has no pkg_resources.
    Adaptation("model_zoo/model_zoo.py", r"import pkg_resources", "import importlib.resources", 1),
    Adaptation(
        "model_zoo/model_zoo.py",
        r"pkg_resources\.resource_filename\(\s*"
        r'"detectron2\.model_zoo", os\.path\.join\("configs", config_path\)\s*\)',
        'str(\n        importlib.resources.files("detectron2.model_zoo") / "configs" / config_path'
        "\n    )",
        1,
    ),
    # Projects of Detectron2's main import LRScheduler, the base of PyTorch's schedulers. The hook
    # would not save the state of a scheduler that is no _LRScheduler.
    Adaptation("engine/hooks.py", r"\b_LRScheduler\b", "LRScheduler", 2),
    Adaptation(
        "solver/lr_scheduler.py",
        r"(?m)^import torch$",
        "import torch\nfrom torch.optim.lr_scheduler import LRScheduler",
        1,
    ),
    Adaptation("solver/__init__.py", r"\bLRMultiplier,", "LRMultiplier, LRScheduler,", 1),
    # PyTorch has no caffe2. As on main, only the export to Caffe2 needs it.
    Adaptation(
        "export/__init__.py",
        r"from \.api import \*",
        "try:\n    from .api import *\nexcept ImportError:\n    pass",
        1,
    ),
)

# v0.6 imports _C without a guard in four modules, and calls two of its functions in collect_env.
COMPILED_OPS_STUB = '''\
"""Stands where the compiled extension would be: pure-Python Detectron2 has none."""

_NONE = "none (pure-Python Detectron2)"


def get_compiler_version():
    return _NONE


def get_cuda_version():
    return _NONE


def has_cuda():
    return False


def __getattr__(name):
    raise AttributeError(
        f"this Detectron2 is pure Python and has no compiled operator '{name}'. For COCO "
        "evaluation pass use_fast_impl=False; for deformable convolution or rotated boxes build "
        "the official Detectron2 from its git repository"
    )
'''

# pip runs the setup.py of a source archive to read its metadata. This replaces setuptools during
# the download, so that none of the archive's code runs.
BACKEND_STUB = """\
import pathlib


class _Backend:
    def get_requires_for_build_wheel(self, config_settings=None):
        return []

    def prepare_metadata_for_build_wheel(self, metadata_directory, config_settings=None):
        folder = pathlib.Path(metadata_directory) / "pb1_detectron2-0.6.dist-info"
        folder.mkdir()
        text = "Metadata-Version: 2.1\\nName: pb1-detectron2\\nVersion: 0.6\\n"
        (folder / "METADATA").write_text(text)
        return folder.name


__legacy__ = _Backend()
"""

# Prints the version and the path of detectron2, each on its own line, and then imports it. Exits
# with code 3 if it is not installed.
PROBE = """\
import importlib.metadata, importlib.util, sys
spec = importlib.util.find_spec("detectron2")
if spec is None or spec.origin is None:
    sys.exit(3)
try:
    version = importlib.metadata.version("detectron2")
except importlib.metadata.PackageNotFoundError:
    version = "of unknown version"
print(version, spec.origin, sep="\\n", flush=True)
import detectron2.layers
"""


class InstallError(Exception):
    """An error whose message is one sentence: what went wrong and what to do."""


class Installed(NamedTuple):
    """A Detectron2 that is installed in this Python."""

    version: str
    path: str
    error: str  # empty if it can be imported


def find_installed(python: str = sys.executable) -> Installed | None:
    """Looks for Detectron2 in an interpreter. Returns None if it is not installed."""
    # In an empty folder, because a folder named detectron2 would be imported instead.
    with tempfile.TemporaryDirectory() as empty:
        run = subprocess.run([python, "-c", PROBE], cwd=empty, capture_output=True, text=True)
    if run.returncode == 3:
        return None
    lines = run.stdout.splitlines()
    if len(lines) < 2:  # the interpreter failed before it printed them
        lines = ["?", "?"]
    version = lines[0]
    folder = str(Path(lines[1]).parent)
    error = ""
    if run.returncode:
        messages = run.stderr.strip().splitlines()
        error = messages[-1] if messages else "unknown error"
    return Installed(version, folder, error)


def download_sdist(folder: Path) -> Path:
    """Downloads the source archive with pip, which uses the user's indexes and proxies."""
    stub = folder / "backend" / "setuptools"
    stub.mkdir(parents=True)
    (stub / "__init__.py").touch()
    (stub / "build_meta.py").write_text(BACKEND_STUB, encoding="utf-8")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{SDIST}==0.6 --hash=sha256:{SHA256}\n", encoding="utf-8")
    # Constraints have no hashes, so pip refuses them together with --require-hashes.
    env = {name: value for name, value in os.environ.items() if "CONSTRAINT" not in name}
    command = ["download", "--require-hashes", "--no-deps", "--no-binary", SDIST, "--use-pep517"]
    command += ["--no-build-isolation", "-r", str(requirements), "-d", str(folder)]
    run_pip(command, {**env, "PYTHONPATH": str(stub.parent)})
    return next(folder.glob("*.tar.gz"))


def read_sdist(path: Path, sha256: str = SHA256) -> dict[str, bytes]:
    """Returns the contents of the archive's regular files, by path below the top folder.

    The archive is read in memory, so it cannot write to other folders.

    Raises:
        InstallError: the file does not have the expected hash.
    """
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != sha256:
        raise InstallError(
            f"{path} has SHA-256 {digest}, not {sha256}: delete it and fetch it again"
        )
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if not member.isreg():
                continue
            content = archive.extractfile(member)
            assert content is not None  # of a regular file
            files[member.name.removeprefix("./").partition("/")[2]] = content.read()
    return files


def adapt(
    files: dict[str, bytes], adaptations: Sequence[Adaptation] = ADAPTATIONS
) -> dict[str, bytes]:
    """Returns the files of the package to install, with all adaptations.

    Raises:
        InstallError: an adaptation did not apply exactly ``times`` times.
    """
    package = {}
    for source, target in PACKAGES.items():
        for name, content in files.items():
            if name.startswith(source):
                package[target + name.removeprefix(source)] = content
    for path, old, new, times in adaptations:
        name = f"detectron2/{path}"
        text, count = re.subn(old, new, package.get(name, b"").decode("utf-8"))
        if count != times:
            raise InstallError(f"'{old}' occurs {count} times in {name}, not {times}")
        package[name] = text.encode("utf-8")
    # The licence requires a notice in changed files.
    for path, old, new, _ in adaptations:
        note = (
            f"# Changed by install_detectron2.py of qbheat_det: {old} -> {' '.join(new.split())}\n"
        )
        package[f"detectron2/{path}"] += note.encode("utf-8")
    package["detectron2/_C.py"] = COMPILED_OPS_STUB.encode("utf-8")
    return package


def build_wheel(package: dict[str, bytes], licence: bytes, folder: Path) -> Path:
    """Writes the package as a reproducible wheel, and returns its path."""
    info = f"detectron2-{VERSION}.dist-info"
    metadata = [
        "Metadata-Version: 2.1",
        "Name: detectron2",
        f"Version: {VERSION}",
        "Summary: Detectron2 v0.6 without its compiled operators, adapted to current libraries",
        "Home-page: https://github.com/facebookresearch/detectron2",
        "Author: FAIR",
        "License: Apache-2.0",
        "License-File: LICENSE",
        "Requires-Python: >=3.7",
        *(f"Requires-Dist: {requirement}" for requirement in REQUIRES),
    ]
    wheel = ["Wheel-Version: 1.0", "Generator: qbheat_det", "Root-Is-Purelib: true"]
    members = {
        **package,
        f"{info}/licenses/LICENSE": licence,
        f"{info}/METADATA": ("\n".join(metadata) + "\n").encode(),
        f"{info}/WHEEL": ("\n".join([*wheel, "Tag: py3-none-any"]) + "\n").encode(),
    }
    record = "".join(f"{line}\n" for line in list_record(members))
    members[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"detectron2-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return path


def list_record(members: dict[str, bytes]) -> Iterator[str]:
    """Yields the lines of a wheel's RECORD, with the hash and the size of each file."""
    for name, content in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
        yield f"{name},sha256={digest.decode()},{len(content)}"


def run_pip(arguments: Sequence[str], env: dict[str, str] | None = None) -> None:
    """Runs pip of this interpreter, whose output the user sees.

    Raises:
        InstallError: pip failed.
    """
    command = [sys.executable, "-m", "pip", *arguments]
    if subprocess.run(command, env=env, check=False).returncode:
        raise InstallError(f"pip failed (see its output above): {' '.join(command)}")


def missing_opencv() -> list[str]:
    """Returns a list with the OpenCV distribution to install, or [] if cv2 can be imported.

    OpenCV is not among Detectron2's requirements, because several distributions have it, and a
    second one would overwrite the first.
    """
    imports = subprocess.run([sys.executable, "-c", "import cv2"], capture_output=True, check=False)
    if imports.returncode:
        return ["opencv-python-headless"]
    return []


def install() -> None:
    """Installs Detectron2 unless this Python has it. Prints its version and folder.

    Raises:
        InstallError: the installation failed, or there is a Detectron2 that cannot be imported.
    """
    installed = find_installed()
    if installed is not None and not installed.error:
        print(f"Detectron2 {installed.version} is in {installed.path}: left as it is")
        return
    if installed is not None and installed.version != VERSION:
        raise InstallError(
            f"Detectron2 {installed.version} in {installed.path} does not import "
            f"({installed.error}): mend it, or run `pip uninstall detectron2` and this again"
        )
    with tempfile.TemporaryDirectory() as folder:
        files = read_sdist(download_sdist(Path(folder)))
        wheel = str(build_wheel(adapt(files), files["LICENSE"], Path(folder)))
        if installed is not None:  # this script has installed it, but it is damaged
            run_pip(["install", "--force-reinstall", "--no-deps", wheel])
        run_pip(["install", wheel, *missing_opencv()])
    installed = find_installed()
    if installed is None:
        raise InstallError("Detectron2 was installed but is not found")
    if installed.error:
        raise InstallError(f"Detectron2 was installed but does not import: {installed.error}")
    print(f"Detectron2 {installed.version} is in {installed.path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    make_parser(__doc__).parse_args(argv)
    try:
        install()
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

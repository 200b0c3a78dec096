# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Checks whether this Python has everything that qbheat_det needs. Prints commands for problems.

Prints versions, the device, whether Detectron2's compiled operators are installed, and the data set
folders. This script itself needs no packages. The exit code is 1 if a requirement is missing.
"""

from __future__ import annotations  # so that the check also runs in a Python that is too old

import importlib
import importlib.metadata
import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from arguments import make_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    Importer = Callable[[str], ModuleType]

ROOT = Path(__file__).resolve().parents[1]

# Module, distribution, and purpose (None if it is required).
LIBRARIES = (
    ("numpy", "numpy", None),
    ("PIL", "Pillow", None),
    ("yaml", "PyYAML", None),
    ("scipy", "scipy", None),
    ("fvcore", "fvcore", None),
    ("pycocotools.mask", "pycocotools", None),
    ("timm", "timm", None),
    ("cv2", "opencv-python-headless", None),
    ("faster_coco_eval", "faster-coco-eval", "faster COCO evaluation"),
    ("transformers", "transformers", "make bench"),
    ("onnx", "onnx", "exporting to ONNX"),
    ("onnxscript", "onnxscript", "exporting to ONNX"),
    ("onnxruntime", "onnxruntime", "running exported ONNX files"),
)
# Distributions with the module cv2. If none is installed, the first one is recommended.
OPENCV = ("opencv-python-headless", "opencv-python", "opencv-contrib-python")

COCO_FILES = (
    "coco/annotations/instances_train2017.json",
    "coco/annotations/instances_val2017.json",
    "coco/train2017",
    "coco/val2017",
)
COCO_COMMAND = (
    "mkdir -p {root}/coco && cd {root}/coco && for f in zips/train2017 zips/val2017 "
    "annotations/annotations_trainval2017; do curl -LO http://images.cocodataset.org/$f.zip "
    "&& unzip -q ${{f##*/}}.zip; done"
)


class Finding(NamedTuple):
    """One line of the report. ``command`` fixes the problem; it is "" if there is no problem."""

    name: str
    text: str
    command: str = ""
    required: bool = False


def pip_install(*distributions: str) -> str:
    """Returns a command that installs into this Python, with the versions in constraints.txt."""
    command = [sys.executable, "-m", "pip", "install"]
    constraints = ROOT / "constraints.txt"
    if constraints.is_file():
        command += ["-c", str(constraints)]
    return shlex.join([*command, *distributions])


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Checks the interpreter, which must be 3.10 or newer."""
    text = f"{'.'.join(str(part) for part in version)} ({sys.executable})"
    if version < (3, 10):
        command = "make install PYTHON=python3.11"
        return Finding("python", f"{text}: older than 3.10", command, required=True)
    return Finding("python", text)


def check_torch(importer: Importer = importlib.import_module) -> Iterator[Finding]:
    """Checks torch, torchvision and whether they are compatible; lists the devices."""
    try:
        torch = importer("torch")
    except Exception as error:
        text = describe_error(error)
        yield Finding("torch", text, pip_install("torch", "torchvision"), required=True)
        return
    yield Finding("torch", torch.__version__)
    try:
        yield Finding("torchvision", importer("torchvision").__version__)
    except ModuleNotFoundError as error:
        text = describe_error(error)
        yield Finding("torchvision", text, pip_install("torchvision"), required=True)
    except Exception as error:  # the operators of torchvision did not load
        text = f"does not import beside torch {torch.__version__} ({describe_error(error)})"
        if "+cpu" in torch.__version__:
            text += ": its build on the package index wants torch's CUDA build, also without a GPU"
        uninstall = [sys.executable, "-m", "pip", "uninstall", "-y", "torch", "torchvision"]
        command = f"{shlex.join(uninstall)} && {pip_install('torch', 'torchvision')}"
        yield Finding("torchvision", text, command, required=True)
    yield Finding("CPU", f"{torch.get_num_threads()} threads")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Finding("CUDA", ", ".join(names) or "no device")


def check_detectron2(importer: Importer = importlib.import_module) -> Iterator[Finding]:
    """Checks Detectron2 and its compiled operators."""
    command = shlex.join([sys.executable, str(ROOT / "tools" / "install_detectron2.py")])
    try:
        package = importer("detectron2")
        importer("detectron2.layers")
        backbone = importer("detectron2.modeling.backbone").Backbone
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("detectron2", "torch", "torchvision"):
            command = pip_install(str(error.name))
        yield Finding("detectron2", describe_error(error), command, required=True)
        return
    except Exception as error:
        uninstall = shlex.join([sys.executable, "-m", "pip", "uninstall", "-y", "detectron2"])
        text = f"does not import: {describe_error(error)}"
        yield Finding("detectron2", text, f"{uninstall} && {command}", required=True)
        return
    version = find_version("detectron2") or package.__version__
    kind = "main" if hasattr(backbone, "padding_constraints") else "release v0.6"
    if version == "0.6+pure":
        kind += ", pure Python from tools/install_detectron2.py"
    yield Finding("detectron2", f"{version} ({kind}) in {Path(package.__file__ or '').parent}")
    operators = importlib.util.find_spec("detectron2._C")
    if operators is None or str(operators.origin).endswith(".py"):
        yield Finding("compiled ops", "no; qbheat_det needs none")
    else:
        yield Finding("compiled ops", "yes")


def check_libraries(importer: Importer = importlib.import_module) -> Iterator[Finding]:
    """Checks all other libraries; one command installs all required ones that are missing."""
    errors: dict[str, Exception] = {}
    versions: dict[str, str] = {}
    for module, distribution, _ in LIBRARIES:
        try:
            library = importer(module)
        except Exception as error:
            errors[distribution] = error
            continue
        names = OPENCV if module == "cv2" else (distribution,)
        installed = [version for version in map(find_version, names) if version]
        if installed:
            versions[distribution] = installed[0]
        else:  # not installed by pip
            versions[distribution] = str(getattr(library, "__version__", "there"))
    required = [name for _, name, purpose in LIBRARIES if name in errors and purpose is None]
    for _, name, purpose in LIBRARIES:
        if name in versions:
            yield Finding(name, versions[name])
        elif purpose is None:
            text = describe_error(errors[name])
            yield Finding(name, text, pip_install(*required), required=True)
        else:
            text = f"{describe_error(errors[name])}; only for {purpose}"
            yield Finding(name, text, pip_install(name))


def check_package() -> Finding:
    """Checks whether qbheat_det itself is installed."""
    version = find_version("qbheat_det")
    if version:
        return Finding("qbheat_det", version)
    command = shlex.join([sys.executable, "-m", "pip", "install", "-e", str(ROOT)])
    return Finding("qbheat_det", "not installed", command, required=True)


def check_datasets(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Checks the folder in which Detectron2 looks for data, and whether COCO is there."""
    root = Path(environ.get("DETECTRON2_DATASETS") or "datasets").expanduser()
    source = "$DETECTRON2_DATASETS"
    if not environ.get("DETECTRON2_DATASETS"):
        source += " is not set"
    yield Finding("datasets", f"{root} ({source})")
    missing = [name for name in COCO_FILES if not (root / name).exists()]
    if not missing:
        yield Finding("COCO 2017", "there")
        return
    text = f"no {', '.join(missing)}"
    if len(missing) == len(COCO_FILES):
        text = "no coco folder"
    text += "; only for COCO's own recipes (20 GB)"
    yield Finding("COCO 2017", text, COCO_COMMAND.format(root=shlex.quote(str(root))))


def find_version(distribution: str) -> str:
    """Returns the installed version of a distribution, or "" if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def describe_error(error: Exception) -> str:
    """Returns the first line of an error's message, or its type if it has no message."""
    if isinstance(error, ModuleNotFoundError):
        return f"no module named {error.name}"
    lines = str(error).strip().splitlines()
    if lines:
        return lines[0]
    return type(error).__name__


def report(findings: Sequence[Finding]) -> int:
    """Prints the findings, then the commands that fix problems; returns the exit code."""
    required: list[str] = []  # commands; one may fix several findings
    optional: list[str] = []
    for finding in findings:
        if not finding.command:
            mark = " "
        elif finding.required:
            mark = "!"
            required.append(finding.command)
        else:
            mark = "-"
            optional.append(finding.command)
        print(f"{mark} {finding.name:<23} {finding.text}")
    required = list(dict.fromkeys(required))
    optional = list(dict.fromkeys(optional))
    if required:
        print("\nTo fix, in this order:", *required, sep="\n  ")
    if optional:
        print("\nOptional:", *optional, sep="\n  ")
    if not required:
        print("\nEverything required is there.")
        return 0
    if (ROOT / "Makefile").is_file():
        print("\nOr make a new environment in .venv with everything in it:\n  make install")
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    make_parser(__doc__).parse_args(argv)
    findings = [check_python(), *check_torch(), *check_detectron2(), *check_libraries()]
    return report([*findings, check_package(), *check_datasets()])


if __name__ == "__main__":
    sys.exit(main())

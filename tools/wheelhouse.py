# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Collects wheels to install qbheat_det on a machine without a network.

The folder gets the wheel of this checkout, a pure-Python Detectron2, and every other requirement
that the machine lacks, for its Python and platform. requirements.txt in the folder lists them.
``--has`` says what the machine has: the output of ``pip freeze`` there, or names such as
``torch==2.11,torchvision,numpy``. A name without a version counts as the version in
constraints.txt. PyTorch and torchvision always count as installed.

    make wheelhouse PYTHON=3.12 TORCH=2.11 HAS=freeze.txt

Then copy the folder, and run on the machine:

    pip install --no-index --find-links wheelhouse -r wheelhouse/requirements.txt
"""

import argparse
import platform
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email.parser import Parser as MetadataParser
from pathlib import Path
from typing import NamedTuple

from arguments import make_parser
from doctor import OPENCV
from install_detectron2 import (
    InstallError,
    adapt,
    build_wheel,
    download_sdist,
    list_record,
    read_sdist,
    run_pip,
)

try:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version
except ModuleNotFoundError:
    sys.exit("error: this tool needs packaging: run `pip install packaging`")

PYTORCH = ("torch", "torchvision")
ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
# The index has only source archives of these, which are pure Python.
SOURCE_ONLY = ("fvcore>=0.1.5,<0.1.6", "iopath>=0.1.7", "antlr4-python3-runtime==4.9.*")
PLATFORM = f"manylinux_2_28_{platform.machine()}"
# Names of manylinux platforms before they contained the version of glibc.
_OLD_NAMES = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


class Wheel(NamedTuple):
    """A wheel file, and what its metadata says."""

    path: Path
    name: str
    version: str
    requires: list[Requirement]


class Target(NamedTuple):
    """The machine on which the wheels will be installed.

    Attributes:
        python: version such as "3.12".
        platform: pip's name, such as "manylinux_2_28_x86_64".
        has: versions of the distributions that it has, by canonical name.
    """

    python: str
    platform: str
    has: Mapping[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """The values of the variables in markers of requirements."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "platform_machine": self.platform.split("_", 3)[-1],
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
        }

    def applies(self, requirement: Requirement, extras: Iterable[str] = ()) -> bool:
        """Whether the marker of a requirement holds on this machine, for any of the extras."""
        marker = requirement.marker
        if marker is None:
            return True
        return any(marker.evaluate({**self.environment, "extra": e}) for e in {"", *extras})


def list_platforms(newest: str) -> list[str]:
    """Returns all platforms whose wheels run on ``newest``.

    Raises:
        InstallError: the name is not of the form manylinux_2_GLIBC_MACHINE.
    """
    match = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", newest)
    if match is None:
        raise InstallError(
            f"--platform {newest}: expected a name such as {PLATFORM}. `ldd --version` prints the "
            "version of glibc, here 2.28, and `uname -m` the machine"
        )
    machine = match[2]
    platforms = []
    for minor in range(int(match[1]), 4, -1):
        platforms.append(f"manylinux_2_{minor}_{machine}")
        if minor in _OLD_NAMES:
            platforms.append(f"{_OLD_NAMES[minor]}_{machine}")
    return [*platforms, f"linux_{machine}"]


def read_committed(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the versions in constraints.txt for a Python, by canonical name."""
    versions = {}
    for line in CONSTRAINTS.read_text("utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(dict(environment)):
            (specifier,) = requirement.specifier
            versions[canonicalize_name(requirement.name)] = specifier.version
    return versions


def read_installed(has: str, committed: Mapping[str, str]) -> dict[str, str]:
    """Returns versions by canonical name, of a file or of names separated by commas.

    Raises:
        InstallError: a line or name is not a requirement, or has an impossible version.
    """
    lines = has.split(",")
    path = Path(has)
    if path.is_file():
        lines = path.read_text("utf-8").splitlines()
    elif "/" in has or has.endswith(".txt"):
        raise InstallError(f"--has {has}: there is no such file; run `pip freeze > {path.name}`")
    installed = {}
    for line in lines:
        line = line.split(" #")[0].strip()
        if not line or line.startswith(("#", "-")):  # -e PATH has no name to read
            continue
        try:
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            versions = [specifier.version for specifier in requirement.specifier]
            if not versions and name in committed:
                versions = [committed[name]]
                print(f"{name}: no version is given, so it counts as {versions[0]}")
            if not versions:
                print(f"{name}: no version is given, so it counts as missing")
                continue
            installed[name] = str(Version(versions[0]))
        except (InvalidRequirement, InvalidVersion) as error:
            raise InstallError(f"--has: '{line}' is not NAME==VERSION: {error}") from error
    return installed


def write_stubs(has: Mapping[str, str], folder: Path) -> list[str]:
    """Writes an empty wheel for each distribution that the machine has.

    pip then resolves requirements as if they were installed. Their versions get the local label
    "target", so pip does not download them. Returns constraints for these versions.
    """
    folder.mkdir()
    constraints = []
    for name, version in has.items():
        stub = f"{version}.target" if "+" in version else f"{version}+target"
        constraints.append(f"{name}=={stub}")
        file_name = name.replace("-", "_")
        info = f"{file_name}-{stub}.dist-info"
        wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        members = {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {stub}\n".encode(),
            f"{info}/WHEEL": wheel.encode(),
        }
        record = "".join(f"{line}\n" for line in list_record(members))
        members[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
        with zipfile.ZipFile(folder / f"{file_name}-{stub}-py3-none-any.whl", "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
    return constraints


def build_own(target: Target, folder: Path) -> None:
    """Builds the wheels of this package, of Detectron2, and of source archives in a folder.

    Raises:
        InstallError: a build failed, or a wheel is not pure Python.
    """
    if not (ROOT / "setup.py").is_file():
        raise InstallError(f"{ROOT} is not a checkout of qbheat_det: run this tool in a checkout")
    sources = []
    for source in SOURCE_ONLY:
        if canonicalize_name(Requirement(source).name) not in target.has:
            sources.append(source)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "checkout"  # a build writes into its folder
        copy.mkdir()
        for name in ("qbheat_det", "configs", "tools"):
            shutil.copytree(ROOT / name, copy / name)
        for name in ("setup.py", "pyproject.toml", "LICENSE", "MANIFEST.in", "README.md"):
            shutil.copy(ROOT / name, copy)
        run_pip(["wheel", "--quiet", "--no-deps", "-w", str(folder), str(copy), *sources])
        if "detectron2" not in target.has:
            files = read_sdist(download_sdist(Path(scratch)))
            build_wheel(adapt(files), files["LICENSE"], folder)
    for path in folder.glob("*.whl"):
        if not path.name.endswith("-none-any.whl"):
            raise InstallError(f"{path.name} is not pure Python, so build it on such a machine")


def read_wheel(path: Path) -> Wheel:
    """Reads the metadata of a wheel."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        metadata = MetadataParser().parsestr(archive.read(name).decode("utf-8"))
    requires = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return Wheel(path, canonicalize_name(metadata["Name"]), metadata["Version"], requires)


def find_needed(
    requirements: Sequence[str], wheels: Iterable[Wheel], target: Target
) -> tuple[list[Wheel], list[Requirement]]:
    """Returns the wheels that requirements need on the machine, and requirements without a wheel.

    pip evaluates markers for the Python that runs it. So it can download wheels that the machine
    does not need, and leave out wheels that it needs.
    """
    by_name = {wheel.name: wheel for wheel in wheels}
    needed: dict[str, Wheel] = {}
    missing: dict[str, Requirement] = {}
    seen = set()
    todo = [Requirement(line) for line in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in target.has or (name, *requirement.extras) in seen:
            continue
        seen.add((name, *requirement.extras))
        if name not in by_name:
            missing[name] = requirement
            continue
        needed[name] = by_name[name]
        for other in by_name[name].requires:
            if target.applies(other, requirement.extras):
                todo.append(other)
    return list(needed.values()), list(missing.values())


def download(
    requirements: Sequence[str],
    constraints: Sequence[str],
    target: Target,
    folder: Path,
    *,
    quiet: bool = True,
) -> None:
    """Downloads wheels to ``folder``, which has the folders "stubs" and "own".

    Raises:
        InstallError: pip failed.
    """
    file = folder / "constraints.txt"
    file.write_text("".join(f"{line}\n" for line in constraints), "utf-8")
    command = ["download", "--progress-bar=off", "--only-binary=:all:", "--implementation=cp"]
    if quiet:
        command.append("--quiet")
    command += [f"--python-version={target.python}", "-d", str(folder), "-c", str(file)]
    for name in list_platforms(target.platform):
        command += ["--platform", name]
    for name in ("stubs", "own"):
        command += ["--find-links", str(folder / name)]
    run_pip([*command, *requirements])


def remove_unfit(target: Target, wheels: Iterable[Wheel], extras: Sequence[str]) -> Target:
    """Returns the machine without what is too old for the given wheels; pip replaces it there.

    Raises:
        InstallError: PyTorch or torchvision is too old.
    """
    has = dict(target.has)
    for wheel in wheels:
        for requirement in wheel.requires:
            name = canonicalize_name(requirement.name)
            if name not in has or not target.applies(requirement, extras):
                continue
            if requirement.specifier.contains(has[name], prereleases=True):
                continue
            told = f"{name} {has[name]} does not fit {wheel.name}, which needs {requirement}"
            if name in PYTORCH:
                raise InstallError(f"{told}: install another one there")
            print(f"{told}, so it is replaced")
            del has[name]
    return target._replace(has=has)


def collect(target: Target, extras: Sequence[str], folder: Path) -> list[Wheel]:
    """Builds and downloads wheels in a new folder; returns those that the machine needs.

    Raises:
        InstallError: a build failed, or no set of wheels fits what the machine has.
    """
    own = folder / "own"
    own.mkdir()
    build_own(target, own)
    target = remove_unfit(target, map(read_wheel, sorted(own.glob("*.whl"))), extras)
    stubs = write_stubs(target.has, folder / "stubs")
    package = "qbheat_det"
    if extras:
        package += f"[{','.join(extras)}]"
    requirements = [package, "detectron2"]
    committed = read_committed(target.environment)
    versions = [f"{n}=={v}" for n, v in committed.items() if n not in target.has]
    try:
        download(requirements, [*stubs, *versions], target, folder)
    except InstallError:
        print("The versions in constraints.txt do not fit the machine, so others are chosen.")
        versions = []
        try:
            download(requirements, stubs, target, folder, quiet=False)
        except InstallError as error:
            raise InstallError(
                "pip found no wheels that fit what the machine has. If its output above names "
                "distributions there, leave them out of --has, so that they are replaced"
            ) from error
    wheels, missing = find_needed(requirements, map(read_wheel, folder.glob("*.whl")), target)
    while missing:
        names = {requirement.name for requirement in missing}
        more = [f"{each.name}{each.specifier}" for each in missing]
        download([*requirements, *more], [*stubs, *versions], target, folder)
        wheels, missing = find_needed(requirements, map(read_wheel, folder.glob("*.whl")), target)
        if names & {requirement.name for requirement in missing}:
            raise InstallError(f"pip downloaded no wheel of {', '.join(sorted(names))}")
    return wheels


def write_folder(wheels: Iterable[Wheel], folder: Path) -> None:
    """Replaces the wheels in a folder, and lists the new ones in requirements.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    lines = []
    for wheel in sorted(wheels, key=lambda wheel: wheel.name):
        shutil.copy(wheel.path, folder)
        lines.append(f"{wheel.name}=={wheel.version}\n")
    (folder / "requirements.txt").write_text("".join(lines), "utf-8")


def describe(folder: Path) -> str:
    """Returns the sizes of the folder and of its largest wheels, and the next command."""
    sizes = sorted(
        ((path.stat().st_size, path.name) for path in folder.glob("*.whl")), reverse=True
    )
    total = sum(size for size, _ in sizes)
    lines = [f"{len(sizes)} wheels, {total / 1e6:.1f} MB, in {folder}. The largest:"]
    lines += [f"  {size / 1e6:6.1f} MB  {name}" for size, name in sizes[:5]]
    lines += [
        f"Copy {folder}, and run on the machine, in the folder that has the copy:",
        f"  pip install --no-index --find-links {folder.name} -r {folder.name}/requirements.txt",
    ]
    return "\n".join(lines)


def parse_target(args: argparse.Namespace) -> Target:
    """Returns the machine that the flags describe.

    Raises:
        InstallError: a version, a platform or a name is wrong.
    """
    if not re.fullmatch(r"3\.\d+", args.python):
        raise InstallError(f"--python {args.python}: expected a version such as 3.12")
    list_platforms(args.platform)
    committed = read_committed(Target(args.python, args.platform, {}).environment)
    has = {name: committed[name] for name in PYTORCH}
    has |= read_installed(args.has, committed)
    if args.torch:
        has |= read_installed(f"torch=={args.torch}", committed)
    return Target(args.python, args.platform, has)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags."""
    parser = make_parser(__doc__)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=running, help="Python there (default: this version)")
    parser.add_argument("--torch", help="PyTorch there, such as 2.11")
    parser.add_argument(
        "--has", default="", metavar="FILE|NAMES", help="what is installed there, besides PyTorch"
    )
    parser.add_argument(
        "--platform", default=PLATFORM, help=f"pip's name of the platform (default: {PLATFORM})"
    )
    parser.add_argument(
        "--extras", default="eval,opencv", help="extras of qbheat_det (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("output/wheelhouse"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    args = parse_args(argv)
    try:
        target = parse_target(args)
        extras = [extra for extra in args.extras.split(",") if extra]
        if set(OPENCV) & set(target.has):  # two distributions would overwrite each other
            extras = [extra for extra in extras if extra != "opencv"]
        with tempfile.TemporaryDirectory() as folder:
            write_folder(collect(target, extras, Path(folder)), args.output)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(args.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())

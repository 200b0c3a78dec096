# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Parts of a model as machine code for one shape of their inputs (torch.export, AOTInductor), CPU.

``torch.compile`` was measured beside it and is slower here by 10 %, and traces again in every
process. Files lie in ``programs`` below ``$QBHEAT_CACHE``, for their owner alone.
"""

import contextlib
import gc
import hashlib
import inspect
import logging
import os
import pickle
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.modeling import Backbone
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from qbheat_det.core.environment import quiet, read_cpu_flags
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import file_lock, hash_tensors
from qbheat_det.core.text import one_line
from qbheat_det.data.datasets.toy import get_cache_dir
from qbheat_det.layers.cpu_kernels import exported_form

logger = logging.getLogger(__name__)

_PARTS = ("backbone", "decoder", "head", "proposal_generator.rpn_head")
_PACKAGE = Path(__file__).resolve().parents[1]
_TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 0.05}  # of an output's largest value
_PLAIN = (bool, int, float, str, tuple, list)


def find_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns by name the parts that take most of the time, or raises a ``UserError``."""
    if isinstance(model, Backbone):
        return {"backbone": model}
    found = {}
    for path in _PARTS:
        with contextlib.suppress(AttributeError):
            found[path] = model.get_submodule(path)
    if "backbone" not in found:
        raise UserError(
            f"{type(model).__name__} has no backbone: deploy takes detectors, classifiers and "
            "backbones"
        )
    return found


@contextlib.contextmanager
def arithmetic(dtype: torch.dtype, device_type: str = "cpu") -> Iterator[None]:
    """Sets, whatever the caller's modes, how deployed models compute: without gradients."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device_type, dtype, enabled=dtype != torch.float32),
    ):
        yield


class PartPrograms:
    """Stands where ``nn.Module.compile`` puts what a module is called through.

    Inputs of a shape that was compiled run as a program, others as the part itself. Copies of the
    part leave it behind.

    Attributes:
        seen: what ``build_programs`` compiles for, inputs by shape; filled where not None.
    """

    def __init__(self, part: nn.Module, dtype: torch.dtype) -> None:
        # ``part`` is in evaluation mode, on the CPU; autocast around the call sets ``dtype``.
        self.seen: dict[tuple[str, ...], tuple[Any, ...]] | None = {}
        self._part = part
        self._dtype = dtype
        self._programs: dict[tuple[str, ...], Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the part."""
        key = _signature(args)
        if not kwargs and key in self._programs:
            return self._programs[key](*tree_map(_lay_out, args))
        if not kwargs and self.seen is not None:
            self.seen[key] = args
        return self._part._call_impl(*args, **kwargs)

    def path_of(self, key: tuple[str, ...]) -> Path:
        """Returns the file of a program, which may not be there."""
        return _make_folder() / f"{self._fingerprint(key)}.pt2"

    def load_or_build(self, args: tuple[Any, ...], key: tuple[str, ...], path: Path) -> None:
        """Loads the program of a shape; builds it if it is not there, damaged or not equal.

        Raises a ``RuntimeError`` if the new one is not, too, and whatever the compiler raises.
        """
        lock = file_lock(path.with_suffix(".lock"), waiting=f"Another process compiles '{path}'")
        with quiet("torch"), arithmetic(self._dtype):
            if self._load(args, key, path):  # a read-only folder has no place for a lock
                return
            with lock:
                if self._load(args, key, path):
                    return
                self._build(args, path)
                if not self._load(args, key, path):
                    path.unlink()
                    raise RuntimeError("the program cannot be loaded or gives other outputs")

    def build(self, args: tuple[Any, ...], path: Path) -> None:
        """Builds the program of a shape if no process has."""
        with arithmetic(self._dtype), file_lock(path.with_suffix(".lock")):
            if not path.exists():
                self._build(args, path)

    def _load(self, args: tuple[Any, ...], key: tuple[str, ...], path: Path) -> bool:
        """Returns whether a program is there, loads, and gives what the part gives."""
        from torch._inductor import aoti_load_package

        if not path.exists():
            return False
        try:
            program: Callable[..., Any] = aoti_load_package(str(path))
            found = program(*tree_map(_lay_out, args))
        except Exception as error:  # what a damaged file raises is PyTorch's choice
            logger.warning("'%s' cannot be loaded: %s", path, one_line(error))
            return False
        # Rounding to bfloat16 changes the order of a detector's selected queries.
        is_ordered = self._dtype != torch.bfloat16
        distance = _distance(found, self._part._call_impl(*args), is_ordered=is_ordered)
        if distance > _TOLERANCE[self._dtype]:
            logger.warning("'%s' differs by %.1g of the largest output", path, distance)
            return False
        self._programs[key] = program
        return True

    def _build(self, args: tuple[Any, ...], path: Path) -> None:
        from torch._inductor import aoti_compile_and_package, config

        options: dict[str, Any] = {
            "freezing": True,  # weights in the layout that each product wants
            # As many threads as the process has when the program runs.
            "cpp.dynamic_threads": True,
            "cpp.threads": max(2, os.cpu_count() or 1),
        }
        # Headers would lie in the folder of temporary files, which other users can write. The
        # wrapper only calls the kernels, and takes twice as long to compile with optimisation.
        for name, value in (("precompile_headers", False), ("compile_wrapper_opt_level", "O0")):
            if hasattr(config.aot_inductor, name):  # not in torch 2.6
                options[f"aot_inductor.{name}"] = value
        fresh = path.with_suffix(f".{os.getpid()}.pt2")
        self._part._compiled_call_impl = None  # trace the part itself
        collects = gc.isenabled()
        gc.disable()  # it goes through millions of the compiler's objects again and again
        try:
            before = exported_form.set("bfloat16" if self._dtype == torch.bfloat16 else "")
            try:
                program = torch.export.export(self._part, tree_map(_lay_out, args), strict=False)
            finally:
                exported_form.reset(before)
            aoti_compile_and_package(program, package_path=str(fresh), inductor_configs=options)
            fresh.replace(path)
        finally:
            self._part._compiled_call_impl = self
            if collects:
                gc.enable()
            fresh.unlink(missing_ok=True)

    def _fingerprint(self, key: tuple[str, ...]) -> str:
        """Returns the digest of all that a program depends on."""
        part = self._part
        settings = [
            f"{name}.{key}={getattr(value, '__qualname__', value)!r}"  # no address in memory
            for name, module in part.named_modules()
            for key, value in sorted(vars(module).items())
            if isinstance(value, _PLAIN) or inspect.isroutine(value)
        ]
        tensors = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        text = [
            hash_tensors(tensors), repr(part), *settings, *key, str(self._dtype),
            torch.__version__, *sorted(read_cpu_flags()),
            *(path.read_text(encoding="utf-8") for path in sorted(_PACKAGE.rglob("*.py"))),
        ]  # fmt: skip
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:32]


_Job = tuple[PartPrograms, tuple[Any, ...], tuple[str, ...], Path]


def build_programs(programs: Sequence[PartPrograms]) -> None:
    """Compiles the parts for the shapes they have seen; further processes build some of them.

    What a process does not finish is built here. Raises as ``PartPrograms.load_or_build`` does.
    """
    jobs: list[_Job] = []
    for program in programs:
        seen, program.seen = program.seen or {}, None
        jobs += [(program, args, key, program.path_of(key)) for key, args in seen.items()]
    missing = [job for job in jobs if not job[-1].exists()]
    count = max(1, min(len(missing), torch.get_num_threads()))
    with contextlib.ExitStack() as stack:
        for i in range(1, count):
            with contextlib.suppress(Exception):  # no memory, no interpreter, no pickle of a part
                stack.callback(_stop, _start_build(missing[i::count]))
        own = {job[-1] for job in missing[::count]}
        for program, args, key, path in sorted(jobs, key=lambda job: job[-1] not in own):
            program.load_or_build(args, key, path)


def _start_build(jobs: Sequence[_Job]) -> subprocess.Popen[bytes]:
    """Starts a process that builds programs, with this one's places of modules and no others."""
    # Not by multiprocessing, which would run a caller's script again that has no __main__ block.
    places = [place for place in sys.path if isinstance(place, str)]
    code = f"import sys; sys.path[:] = {places!r}; from {__name__} import build_jobs; build_jobs()"
    with tempfile.TemporaryFile() as pickled:
        pickle.dump(list(jobs), pickled)
        pickled.seek(0)
        command = [sys.executable, "-I", "-c", code]
        null = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=pickled, stdout=null, stderr=null)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def build_jobs() -> None:
    """Builds the pickled jobs that come on standard input, with one thread."""
    torch.set_num_threads(1)
    for program, args, _, path in pickle.load(sys.stdin.buffer):
        program.build(args, path)


def _make_folder() -> Path:
    """Returns the folder of programs, which are run: so it is an error if others can write it."""
    folder = get_cache_dir() / "programs"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise UserError(f"'{folder}' cannot be made: set QBHEAT_CACHE to another folder") from error
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if hasattr(os, "geteuid") and (others or status.st_uid != os.geteuid()):
        raise UserError(f"others can write '{folder}', whose files are run: chmod 700, or set "
                        "QBHEAT_CACHE to another folder")  # fmt: skip
    return folder


def _signature(args: tuple[Any, ...]) -> tuple[str, ...]:
    leaves, structure = tree_flatten(args)
    shapes = (f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x) for x in leaves)
    return (str(structure), *shapes)


def _lay_out(x: Any) -> Any:
    """Brings a map into channels-last order, which programs are made for and do not check."""
    if not isinstance(x, Tensor):
        return x
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()


def _distance(found: Any, expected: Any, *, is_ordered: bool = True) -> float:
    """Returns the largest difference of outputs, relative to the largest value; a NaN is large.

    Without order, the sorted values of an output are compared.
    """
    ratios = []
    for a, b in zip(tree_flatten(found)[0], tree_flatten(expected)[0], strict=True):
        if isinstance(b, Tensor):
            a, b = a.double().flatten(), b.double().flatten()
            difference = a - b if is_ordered else a.sort().values - b.sort().values
            ratios.append(float(difference.abs().max() / b.abs().max().clamp(min=1e-6)))
    return max(float("inf") if ratio != ratio else ratio for ratio in ratios)

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compiles parts of a model for one input shape on the CPU (torch.export, AOTInductor).

The compiled programs are files in ``$QBHEAT_CACHE/programs``, which later processes load. On CPUs,
programs of ``torch.compile`` are 10 % slower, and every process traces the model again.
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
from qbheat_det.core.files import file_lock, get_cache_dir, hash_tensors
from qbheat_det.core.text import one_line
from qbheat_det.layers.cpu_kernels import recorded_as

logger = logging.getLogger(__name__)

_PARTS = ("backbone", "decoder", "head", "proposal_generator.rpn_head")
_PACKAGE = Path(__file__).resolve().parents[1]
_TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 0.05}  # relative to an output's largest value


def find_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the parts of a model that take most of the time, by name.

    Raises a ``UserError`` if the model has no backbone.
    """
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
    """Context without gradients, without inference mode, and with autocast to ``dtype``.

    Autocast is off if ``dtype`` is float32.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device_type, dtype, enabled=dtype != torch.float32),
    ):
        yield


class PartPrograms:
    """The compiled programs of a part of a model, by input shape.

    An instance replaces the part's ``_compiled_call_impl``, which PyTorch calls. Inputs whose shape
    has no program run through the uncompiled part. Copies have no programs.

    Attributes:
        seen: inputs of calls, by shape, for which ``build_programs`` compiles. None if calls are
            not recorded.
    """

    def __init__(self, part: nn.Module, dtype: torch.dtype) -> None:
        # ``part`` must be in eval mode and on the CPU. Callers enable autocast to ``dtype``.
        self.seen: dict[tuple[str, ...], tuple[Any, ...]] | None = {}
        self._part = part
        self._dtype = dtype
        self._programs: dict[tuple[str, ...], Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the program for the shape of the inputs, or else the uncompiled part."""
        key = _signature(args)
        if not kwargs and key in self._programs:
            return self._programs[key](*tree_map(_lay_out, args))
        if not kwargs and self.seen is not None:
            self.seen[key] = args
        return self._part._call_impl(*args, **kwargs)

    def path_of(self, key: tuple[str, ...]) -> Path:
        """Returns the path of the program for the shape ``key``, whether or not the file exists."""
        return _make_folder() / f"{self._fingerprint(key)}.pt2"

    def load_or_build(self, args: tuple[Any, ...], key: tuple[str, ...], path: Path) -> None:
        """Loads the program for a shape; builds it if the file is missing, damaged or inaccurate.

        A program is inaccurate if its outputs differ from the part's by more than rounding. Raises
        a ``RuntimeError`` if the new program is damaged or inaccurate, and errors of the compiler.
        """
        lock = file_lock(path.with_suffix(".lock"), waiting=f"Another process compiles '{path}'")
        with quiet("torch"), arithmetic(self._dtype):
            if self._load(args, key, path):  # without the lock, for read-only folders
                return
            with lock:
                if self._load(args, key, path):
                    return
                self._build(args, path)
                if not self._load(args, key, path):
                    path.unlink()
                    raise RuntimeError("the program cannot be loaded or gives other outputs")

    def build(self, args: tuple[Any, ...], path: Path) -> None:
        """Builds the program for a shape if its file does not exist."""
        with arithmetic(self._dtype), file_lock(path.with_suffix(".lock")):
            if not path.exists():
                self._build(args, path)

    def _load(self, args: tuple[Any, ...], key: tuple[str, ...], path: Path) -> bool:
        """Loads a program, and returns whether its outputs equal the part's outputs."""
        from torch._inductor import aoti_load_package

        if not path.exists():
            return False
        try:
            program: Callable[..., Any] = aoti_load_package(str(path))
            found = program(*tree_map(_lay_out, args))
        except Exception as error:  # PyTorch raises errors of many types for damaged files
            logger.warning("'%s' cannot be loaded: %s", path, one_line(error))
            return False
        # Rounding to bfloat16 can change the order of the queries that a detector selects.
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
            "freezing": True,  # weights in the layout that each product needs
            # The program uses the number of threads of the process that runs it.
            "cpp.dynamic_threads": True,
            "cpp.threads": max(2, os.cpu_count() or 1),
        }
        # Precompiled headers would be in the temporary folder, to which other users can write. The
        # wrapper only calls the kernels, and optimizing it would double the compile time.
        for name, value in (("precompile_headers", False), ("compile_wrapper_opt_level", "O0")):
            if hasattr(config.aot_inductor, name):  # not in torch 2.6
                options[f"aot_inductor.{name}"] = value
        fresh = path.with_suffix(f".{os.getpid()}.pt2")
        self._part._compiled_call_impl = None  # trace the part itself
        collects = gc.isenabled()
        gc.disable()  # garbage collection is slow with the compiler's millions of objects
        try:
            with recorded_as("bfloat16" if self._dtype == torch.bfloat16 else ""):
                program = torch.export.export(self._part, tree_map(_lay_out, args), strict=False)
            aoti_compile_and_package(program, package_path=str(fresh), inductor_configs=options)
            fresh.replace(path)
        finally:
            self._part._compiled_call_impl = self
            if collects:
                gc.enable()
            fresh.unlink(missing_ok=True)

    def _fingerprint(self, key: tuple[str, ...]) -> str:
        """Returns a digest of everything that a program depends on."""
        part = self._part
        settings = [
            f"{name}.{key}={getattr(value, '__qualname__', value)!r}"  # no address in memory
            for name, module in part.named_modules()
            for key, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, float, str, tuple, list)) or inspect.isroutine(value)
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
    """Compiles the parts for the shapes in ``seen``, in several processes.

    This process builds the programs that the started processes have not built. Raises the errors of
    ``PartPrograms.load_or_build``.
    """
    jobs: list[_Job] = []
    for program in programs:
        seen, program.seen = program.seen or {}, None
        jobs += [(program, args, key, program.path_of(key)) for key, args in seen.items()]
    missing = [job for job in jobs if not job[-1].exists()]
    count = max(1, min(len(missing), torch.get_num_threads()))
    with contextlib.ExitStack() as stack:
        for i in range(1, count):
            with contextlib.suppress(Exception):  # too little memory, or a part cannot be pickled
                process = stack.enter_context(_start_build(missing[i::count]))  # waits at its end
                stack.callback(process.kill)
        own = {job[-1] for job in missing[::count]}
        for program, args, key, path in sorted(jobs, key=lambda job: job[-1] not in own):
            program.load_or_build(args, key, path)


def _start_build(jobs: Sequence[_Job]) -> subprocess.Popen[bytes]:
    """Starts a process, with the ``sys.path`` of this one, that builds programs."""
    # multiprocessing would run the user's script again if it has no __main__ block.
    paths = [path for path in sys.path if isinstance(path, str)]
    code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import build_jobs; build_jobs()"
    with tempfile.TemporaryFile() as pickled:
        pickle.dump(list(jobs), pickled)
        pickled.seek(0)
        command = [sys.executable, "-I", "-c", code]
        null = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=pickled, stdout=null, stderr=null)


def build_jobs() -> None:
    """Reads pickled jobs from standard input, and builds their programs with one thread."""
    torch.set_num_threads(1)
    for program, args, _, path in pickle.load(sys.stdin.buffer):
        program.build(args, path)


def _make_folder() -> Path:
    """Returns the folder of programs, or raises a ``UserError`` if other users can write to it."""
    folder = get_cache_dir() / "programs"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise UserError(f"'{folder}' cannot be made: set QBHEAT_CACHE to another folder") from error
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if hasattr(os, "geteuid") and (others or status.st_uid != os.geteuid()):
        raise UserError(
            f"other users can write to '{folder}', whose files are executed: chmod 700, or set "
            "QBHEAT_CACHE to another folder"
        )
    return folder


def _signature(args: tuple[Any, ...]) -> tuple[str, ...]:
    leaves, structure = tree_flatten(args)
    shapes = (f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x) for x in leaves)
    return (str(structure), *shapes)


def _lay_out(x: Any) -> Any:
    """Makes feature maps channels-last; programs require this, but do not check it."""
    if not isinstance(x, Tensor):
        return x
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()


def _distance(found: Any, expected: Any, *, is_ordered: bool) -> float:
    """Returns the largest difference of outputs, relative to their largest value; NaN gives inf.

    If not ``is_ordered``, compares the sorted values of each output.
    """
    ratios = []
    for a, b in zip(tree_flatten(found)[0], tree_flatten(expected)[0], strict=True):
        if isinstance(b, Tensor):
            a, b = a.double().flatten(), b.double().flatten()
            difference = a - b if is_ordered else a.sort().values - b.sort().values
            ratios.append(float(difference.abs().max() / b.abs().max().clamp(min=1e-6)))
    return max(float("inf") if ratio != ratio else ratio for ratio in ratios)

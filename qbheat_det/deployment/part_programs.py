# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The programs of one part of a model, by the shapes of its inputs: which there are and get made.

A program is of one exact shape: only then does the compiler know enough to gain anything. So a
size that is rare is left to the plain form, which takes any.
"""

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from qbheat_det.core.errors import UserError

from .fingerprint import describe, key_of
from .program import (
    Arguments,
    InPrecision,
    Run,
    build_program,
    lay_out,
    open_program,
    require_compiler,
)
from .program_cache import Entry, ProgramCache
from .report import DeployReport

MOST_COMPILED = 4
"""Programs of a part that one process compiles without being asked for that size."""
_MOST_LOADED = 16  # of a part, each with a copy of its weights
_ROUNDS = 5
# Largest distance from the plain form, relative to an output's largest value. Rounding makes 1e-5;
# of boxes in parts of an image 5e-5 is under a tenth of a pixel.
_TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 0.2}

Signature = tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """What runs for one image, and for each of its outputs the axis of the images, if any."""

    run: Run
    batch_axes: Sequence[int | None]


@dataclass
class Plan:
    """When and where programs are made.

    Attributes:
        cache: of programs.
        compile_after: images of a size after which it is compiled; 0 is never.
        tell: prints a line.
        report: takes a line for each program.
        asks: whether what comes now is a size that was asked for.
    """

    cache: ProgramCache
    compile_after: int
    tell: Callable[[str], None]
    report: DeployReport
    asks: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Plan":
        return replace(self, report=copy.deepcopy(self.report, memo))


@dataclass
class PartPrograms:
    """Finds the program for what a part is called with.

    A program that is loaded is compared once with the part, on the first image that it is for: what
    a part does may hang on more than its key knows. That costs each process a plain forward pass
    for each size.

    Attributes:
        part: in evaluation mode, with its weights.
        name: of the part, for people.
        dtype: float32 or bfloat16.
        own: its forward pass as it is written.
        plain: the same in ``dtype``, what runs without a program.
        plan: see ``Plan``; of all parts of a model.
    """

    part: nn.Module
    name: str
    dtype: torch.dtype
    own: Run
    plain: Run
    plan: Plan
    _description: dict[str, str] = field(init=False)
    _found: dict[Signature, Program | None] = field(default_factory=dict)
    _seen: dict[Signature, int] = field(default_factory=dict)
    _num_compiled: int = 0
    _has_failed: bool = False

    def __post_init__(self) -> None:
        self._description = describe(self._module(), name=self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PartPrograms":
        twin = copy.copy(self)  # programs are shared: they change nothing
        twin.part, twin.own, twin.plain, twin.plan = copy.deepcopy(
            (self.part, self.own, self.plain, self.plan), memo
        )
        twin._found, twin._seen = dict(self._found), dict(self._seen)
        return twin

    def find(self, signature: Signature, arguments: Arguments, count: int) -> Program | None:
        """Returns the program for images of a shape, made now if it is time; None if there is none.

        Args:
            signature: of the arguments, the number of images left out.
            arguments: of one image or more.
            count: how many images.
        """
        if signature in self._found:
            return self._found[signature]
        is_new = signature not in self._seen
        seen = self._seen[signature] = self._seen.get(signature, 0) + count
        often = 0 < self.plan.compile_after <= seen and self._num_compiled < MOST_COMPILED
        wanted = (self.plan.asks or often) and not self._has_failed
        room = self.plan.asks or len(self._found) < _MOST_LOADED
        if not room or not (is_new or wanted):
            return None
        why = "as asked for" if self.plan.asks else f"which has come {seen} times"
        with torch.inference_mode(False), torch.no_grad():
            try:
                self._look_up(signature, arguments, why if wanted else None)
            except Exception as error:  # of PyTorch's many kinds: each leaves the plain form
                self._has_failed = True
                self._found[signature] = None
                self._note(False, arguments, first_line(error))
        if self.plan.asks and signature not in self._found:
            self._found[signature] = None
            self._note(False, arguments, "not compiled, since compiling failed before")
        return self._found.get(signature)

    def _look_up(self, signature: Signature, arguments: Arguments, why: str | None) -> None:
        """Keeps what the cache knows of a signature, made now if there is a reason to and need."""
        description: dict[str, Any] = {**self._description, "inputs": list(signature)}
        key, cache = key_of(description), self.plan.cache
        entry = _whole(cache.get(key, description))
        if self._adopt(signature, arguments, key, entry) or why is None:
            return
        with cache.lock(key):
            entry = _whole(cache.get(key, description))  # made while this process waited
            if self._adopt(signature, arguments, key, entry):
                return
            require_compiler()
            self._num_compiled += not self.plan.asks
            where = _sizes(arguments)
            self.plan.tell(f"compiling the {self.name} for {where}, {why}: a minute or several")
            start = time.perf_counter()
            slow_with = entry.notes["slow_with"] if entry is not None else []
            cache.put(
                key,
                description,
                functools.partial(self._build, _first_image(arguments), slow_with),
            )
            seconds = time.perf_counter() - start
            self._adopt(signature, arguments, key, cache.get(key, description), seconds)

    def _build(self, arguments: Arguments, slow_with: list[int], path: Path) -> dict[str, Any]:
        """Writes a program to ``path`` unless it had better not be used; returns what was seen.

        Args:
            arguments: of one image.
            slow_with: numbers of threads with which it was slower before.
            path: of the package.
        """
        with self._without_programs():
            build_program(self._module(), arguments, path)
        run = open_program(path)
        distance = _distance(run(*arguments), self.own(*arguments))
        fast, slow = race(run, self.plain, arguments)
        refused, tried = None, []
        if not distance <= _TOLERANCE[self.dtype]:
            refused = _differs(distance)
        elif fast >= slow:
            refused = f"slower than without: {fast:.2g} s an image, not {slow:.2g}"
            tried = [*slow_with, torch.get_num_threads()]
        if refused:
            path.unlink()
        return {
            "refused": refused,
            "slow_with": tried,
            "batch_axes": find_batch_axes(self.plain, arguments),
            "seconds": fast,
            "plain_seconds": slow,
        }

    def _adopt(
        self,
        signature: Signature,
        arguments: Arguments,
        key: str,
        entry: Entry | None,
        compiled: float | None = None,
    ) -> bool:
        """Takes an entry for what there is for a signature, if there is one and it holds here.

        Args:
            signature: of the arguments.
            arguments: of one image or more.
            key: of the entry.
            entry: as the cache has it.
            compiled: seconds of compiling, if it was made now.
        """
        if entry is None:
            return False
        notes = entry.notes
        made = "" if compiled is None else f"compiled in {compiled:.0f} s; "
        if entry.package is None:
            slow_with = notes["slow_with"]
            if slow_with and torch.get_num_threads() not in slow_with:
                return False  # which may be faster with these
            self._found[signature] = None
            self._note(False, arguments, f"{made}{notes['refused']}")
            return True
        start = time.perf_counter()
        run = open_program(entry.package)
        loaded = time.perf_counter() - start
        image = _first_image(arguments)
        distance = _distance(run(*image), self.own(*image))
        if not distance <= _TOLERANCE[self.dtype]:
            self.plan.cache.drop(key)
            self._note(False, arguments, f"the one in the cache is dropped: {_differs(distance)}")
            return False
        gain = f"{notes['seconds']:.2g} s an image, {notes['plain_seconds']:.2g} without"
        again = "loaded" if compiled is None else "again"
        folder = self.plan.cache.folder
        self._note(True, arguments, f"{made}{gain}; {again} in {loaded:.1f} s from {folder}")
        self._found[signature] = Program(run, notes["batch_axes"])
        return True

    def _note(self, applied: bool, arguments: Arguments, sentence: str) -> None:
        line = f"{self.name} for {_sizes(arguments)}: {sentence}"
        self.plan.report.add("program", applied, line)
        self.plan.tell(f"{'program' if applied else 'no program'} of the {line}")

    def _module(self) -> InPrecision:
        return InPrecision(self.part, self.dtype, torch.device("cpu"))

    @contextlib.contextmanager
    def _without_programs(self) -> Iterator[None]:
        """Has the part itself run when it is called; ``ProgramCache.put`` lets one thread in."""
        before = self.part.forward
        self.part.forward = self.own
        try:
            yield
        finally:
            self.part.forward = before


def _whole(entry: Entry | None) -> Entry | None:
    """Returns an entry that says all that ``PartPrograms`` writes; one that does not is none."""
    wanted = {"refused", "slow_with", "batch_axes", "seconds", "plain_seconds"}
    if entry is None or not wanted <= set(entry.notes):
        return None
    return entry if bool(entry.notes["refused"]) == (entry.package is None) else None


def find_batch_axes(run: Run, arguments: Arguments) -> list[int | None]:
    """Returns for each tensor of the outputs the axis along which images are stacked.

    Args:
        run: called with one image and with two.
        arguments: of one image.
    """
    two_images = tree_map(lambda x: torch.cat([x, x]) if isinstance(x, Tensor) else x, arguments)
    one, two = (tree_flatten(run(*x))[0] for x in (arguments, two_images))
    return [_axis_of(a, b) for a, b in zip(one, two, strict=True)]


def _axis_of(one: Any, two: Any) -> int | None:
    if not isinstance(one, Tensor) or one.dim() != two.dim():
        return None
    grown = [i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and two.shape[grown[0]] == 2 else None


def _first_image(arguments: Arguments) -> Arguments:
    leaves, structure = tree_flatten(arguments)
    first = [x[:1].clone() if isinstance(x, Tensor) else x for x in leaves]
    found: Arguments = lay_out(tree_unflatten(first, structure))
    return found


def _distance(found: Any, wanted: Any) -> float:
    """Returns the largest distance of two outputs, relative to the largest value."""
    pairs = zip(tree_flatten(found)[0], tree_flatten(wanted)[0], strict=True)
    distances = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-6))
        for a, b in pairs
        if isinstance(b, Tensor)
    ]
    return max(distances, key=lambda x: float("inf") if x != x else x)  # a NaN is the largest


def _differs(distance: float) -> str:
    return f"its outputs differ from the plain ones by {distance:.1g} of the largest"


def race(one: Run, other: Run, arguments: Arguments) -> tuple[float, float]:
    """Returns the least seconds of each, taken in turns: what else runs here slows both."""
    seconds: list[list[float]] = [[], []]
    for _ in range(_ROUNDS):
        for run, taken in zip((one, other), seconds, strict=True):
            start = time.perf_counter()
            run(*arguments)
            taken.append(time.perf_counter() - start)
    return min(seconds[0]), min(seconds[1])


def _sizes(arguments: Arguments) -> str:
    """Returns rows and columns of the maps that a part reads, for people."""
    maps = [x for x in tree_flatten(arguments)[0] if isinstance(x, Tensor) and x.dim() == 4]
    return " and ".join(f"{x.shape[-2]}x{x.shape[-1]}" for x in maps) or "its one size"


def first_line(error: Exception) -> str:
    """Returns an error's beginning in one line."""
    text = " ".join((str(error) or type(error).__name__).split("\n\n", 1)[0].split())
    return text if len(text) < 300 or isinstance(error, UserError) else f"{text[:300]} …"

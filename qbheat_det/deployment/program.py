# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A part of a model as machine code for images of any size: torch.export, then AOTInductor."""

import contextlib
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from qbheat_det.errors import UserError

from .fingerprint import describe, key_of
from .program_cache import ProgramCache

LEAST_PIXELS, MOST_PIXELS = 65, 4096
"""Sides of images for which programs are made; others take the plain form."""

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class SizeRange:
    """What rows or columns of a map may be: multiples of ``step`` from ``least`` to ``most``."""

    least: int
    most: int
    step: int = 1

    def __contains__(self, size: object) -> bool:
        return isinstance(size, int) and self.least <= size <= self.most and size % self.step == 0


@dataclass(frozen=True)
class Sample:
    """Arguments of a part, as one image gives them, and what their maps' sides may be.

    ``ranges`` has for each tensor of ``arguments``, flattened, the ranges of rows and columns, or
    None where the shape is always the same.
    """

    arguments: Arguments
    ranges: tuple[tuple[SizeRange, SizeRange] | None, ...]


def make_sample(arguments: Arguments, *, image_side: int, step: int, fixed: bool) -> Sample:
    """Finds which sides of the arguments follow the image.

    Args:
        arguments: of a part, for an image whose shorter side is ``image_side`` pixels.
        image_side: see above.
        step: images are multiples of it; for a part that reads maps, 0.
        fixed: whether all images have one size.
    """
    ranges: list[tuple[SizeRange, SizeRange] | None] = []
    for leaf in tree_flatten(arguments)[0]:
        if not isinstance(leaf, Tensor) or leaf.dim() != 4 or fixed:
            ranges.append(None)
        elif step:
            least = -(-LEAST_PIXELS // step) * step
            ranges.append((SizeRange(least, MOST_PIXELS, step),) * 2)
        else:
            short = min(leaf.shape[-2:])
            least = max(2, -(-LEAST_PIXELS * short // image_side))
            ranges.append((SizeRange(least, MOST_PIXELS),) * 2)
    return Sample(lay_out(arguments), tuple(ranges))


def lay_out(arguments: Any) -> Any:
    """Brings maps into channels-last order, which programs are made for and do not check."""
    leaves, structure = tree_flatten(arguments)
    ordered = [
        x
        if not isinstance(x, Tensor)
        else x.contiguous(memory_format=torch.channels_last)
        if x.dim() == 4
        else x.contiguous()
        for x in leaves
    ]
    return tree_unflatten(ordered, structure)


class InPrecision(nn.Module):
    """A part computed in bfloat16 where PyTorch's autocast says so, with outputs in float32.

    In float32 it is the part, with the same signature for all parts.
    """

    def __init__(self, part: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.part = part
        self.dtype, self.device_type = dtype, device.type

    def forward(self, *arguments: Any) -> Any:
        """As the part's own."""
        if self.dtype == torch.float32:
            return self.part(*arguments)
        with torch.autocast(self.device_type, dtype=self.dtype):
            found = self.part(*arguments)
        return tree_map(lambda x: x.float() if isinstance(x, Tensor) else x, found)


def load_program(
    part: InPrecision,
    sample: Sample,
    *,
    name: str,
    cache: ProgramCache,
    check: Callable[[Callable[..., Any]], None],
    tell: Callable[[str], None],
) -> Callable[..., Any]:
    """Returns a part as a program, from the cache or made now.

    Args:
        part: in evaluation mode, with its weights.
        sample: what it is called with.
        name: of the part, for people.
        cache: where programs are kept.
        check: raises an error where the program it is given does not do as the part.
        tell: prints a line.

    Raises:
        UserError: there is no compiler.
        Exception: of any kind, where PyTorch cannot export or compile the part.
    """
    description = describe(part, name=name, ranges=sample.ranges, shapes=_shapes(sample))
    key = key_of(description)
    program = _open(cache, key, description)
    if program is not None:
        return program
    with cache.lock(key):
        program = _open(cache, key, description)  # made while this process waited
        if program is not None:
            return program
        cache.drop(key)
        require_compiler()
        tell(f"compiling the {name} for this processor, once: a minute or several")
        start = time.perf_counter()
        cache.put(key, description, lambda path: _build(part, sample, path))
        made = time.perf_counter() - start
        program = _open(cache, key, description)
        if program is None:
            raise RuntimeError("the program that was written cannot be read")
        try:
            check(program)
        except Exception:
            cache.drop(key)
            raise
        start = time.perf_counter()
        _open(cache, key, description)
        again = time.perf_counter() - start
        tell(f"compiled the {name} in {made:.0f} s; again in {again:.1f} s from {cache.folder}")
    return program


def require_compiler() -> None:
    """Raises a UserError where there is no C++ compiler."""
    from torch._inductor import config

    wanted = [name for name in config.cpp.cxx if name]
    if not any(shutil.which(name) for name in wanted):
        raise UserError(
            f"there is no C++ compiler ({' or '.join(wanted)}): install one (on Debian: apt "
            "install g++), or name yours in $CXX"
        )


def _open(cache: ProgramCache, key: str, description: dict[str, Any]) -> Callable[..., Any] | None:
    from torch._inductor import aoti_load_package

    path = cache.get(key, description)
    if path is None:
        return None
    with _quiet():
        program = aoti_load_package(str(path))
    return lambda *arguments: program(*lay_out(arguments))


def _build(part: InPrecision, sample: Sample, path: Path) -> None:
    from torch._inductor import aoti_compile_and_package

    threads = max(2, os.cpu_count() or 1)
    with _quiet(), torch.no_grad():
        exported = torch.export.export(
            part, sample.arguments, dynamic_shapes=(_dynamic_shapes(sample),), strict=False
        )
        aoti_compile_and_package(
            exported,
            package_path=str(path),
            inductor_configs={
                "freezing": True,  # weights in the layout that each product wants
                # As many threads as the process has when the program runs.
                "cpp.dynamic_threads": True,
                "cpp.threads": threads,
            },
        )


def _dynamic_shapes(sample: Sample) -> Any:
    count = iter(range(1000))
    ranges = iter(sample.ranges)

    def spec(leaf: Any) -> dict[int, Any] | None:
        sides = next(ranges)
        return None if sides is None else {2 + axis: dim(side) for axis, side in enumerate(sides)}

    def dim(side: SizeRange) -> Any:
        least, most = side.least // side.step, side.most // side.step
        free = torch.export.Dim(f"side{next(count)}", min=least, max=most)
        return side.step * free if side.step > 1 else free

    return tree_map(spec, sample.arguments)


def _shapes(sample: Sample) -> list[str]:
    leaves, structure = tree_flatten(sample.arguments)
    return [
        str(structure),
        *(f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x) for x in leaves),
    ]


@contextlib.contextmanager
def _quiet(names: Sequence[str] = ("torch",)) -> Iterator[None]:
    """Keeps warnings of the compiler's own away from people who cannot act on them."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)

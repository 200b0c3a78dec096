# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A part of a model that runs as a program where there is one, and as itself elsewhere."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .part_programs import PartPrograms, Program, Signature
from .program import Arguments


class CompiledForward:
    """Takes the place of a part's ``forward``.

    A program takes one image; of a batch of equal sizes it runs one after another, which costs a
    processor nothing. What there is no program for goes the plain way, as does what needs
    gradients, and what the caller has run under an autocast of his own: a program would ignore it,
    and one made then would keep it.

    Attributes:
        programs: of the part.
        runs: how often a program has run, an image each.
        plain_runs: how often the plain form has run instead.
    """

    def __init__(self, programs: PartPrograms) -> None:
        """
        Args:
            programs: of the part.
        """
        self.programs = programs
        self.runs = 0
        self.plain_runs = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledForward":
        twin = copy.copy(self)
        twin.programs = copy.deepcopy(self.programs, memo)
        return twin

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        fitting = strip_defaults(arguments)
        leaves, structure = tree_flatten(fitting)
        plainly = bool(keywords) or torch.is_autocast_enabled("cpu")
        count = 0 if plainly else count_images(leaves)
        program = None
        if count:
            program = self.programs.find(signature_of(leaves, structure), fitting, count)
        if program is None or (count > 1 and None in program.batch_axes):
            self.plain_runs += 1
            return self.programs.plain(*arguments, **keywords)
        self.runs += count
        with torch.no_grad():
            if count == 1:
                return program.run(*fitting)
            return _run_each(program, leaves, structure, count)


def _run_each(program: Program, leaves: list[Any], structure: TreeSpec, count: int) -> Any:
    rows, axes = [], [axis for axis in program.batch_axes if axis is not None]
    for index in range(count):
        row = [x[index : index + 1] if isinstance(x, Tensor) else x for x in leaves]
        found, form = tree_flatten(program.run(*tree_unflatten(row, structure)))
        rows.append(found)
    joined = [
        torch.cat(parts, dim=axis)
        for parts, axis in zip(zip(*rows, strict=True), axes, strict=True)
    ]
    return tree_unflatten(joined, form)


def strip_defaults(arguments: Arguments) -> Arguments:
    """Leaves out Nones at the end, which say what is left out says."""
    while arguments and arguments[-1] is None:
        arguments = arguments[:-1]
    return arguments


def count_images(leaves: list[Any]) -> int:
    """Returns how many images there are, the length of every tensor; 0 if no program can take them.

    Args:
        leaves: arguments, flattened.
    """
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if any(x.requires_grad or x.dim() == 0 for x in tensors):
        return 0
    counts = {len(x) for x in tensors}
    return counts.pop() if len(counts) == 1 else 0


def signature_of(leaves: list[Any], structure: TreeSpec) -> Signature:
    """Returns what a program is made for: structure, and of each tensor type and shape of an image.

    Args:
        leaves: arguments, flattened.
        structure: of the arguments.
    """
    return (
        str(structure),
        *(
            f"{tuple(x.shape[1:])} {x.dtype} {x.device}" if isinstance(x, Tensor) else repr(x)
            for x in leaves
        ),
    )

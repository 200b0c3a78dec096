# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A part of a model that runs as a program where the program fits, and as itself elsewhere."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .program import Arguments, Sample

Run = Callable[..., Any]


class CompiledForward:
    """Takes the place of a part's ``forward``.

    A program takes one image; of a batch of equal sizes it runs one after another, which costs a
    processor nothing. What it was not made for goes the plain way: other sizes, other arguments
    (as the sizes of the images of a padded batch), gradients.

    Attributes:
        runs: how often the program has run, an image each.
        plain_runs: how often the plain form has run instead.
    """

    def __init__(
        self,
        *,
        plain: Run,
        program: Run,
        sample: Sample,
        batch_axes: Sequence[int | None],
        tell: Callable[[str], None],
        name: str,
    ) -> None:
        """
        Args:
            plain: the part's own ``forward``.
            program: the same for one image, without gradients.
            sample: what the program takes.
            batch_axes: for each tensor of the outputs, flattened, the axis of the images.
            tell: prints a line.
            name: of the part, for people.
        """
        self.plain = plain
        self.program = program
        self._leaves, self._structure = tree_flatten(sample.arguments)
        self._ranges = sample.ranges
        self._batch_axes = list(batch_axes)
        self._tell = tell
        self._name = name
        self._has_told = False
        self.runs = 0
        self.plain_runs = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledForward":
        twin = copy.copy(self)  # the program is shared: it changes nothing
        twin.plain = copy.deepcopy(self.plain, memo)
        return twin

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        arguments = strip_defaults(arguments)
        leaves, structure = tree_flatten(arguments)
        count = None if keywords else self._count_images(leaves, structure)
        if count is None:
            self.plain_runs += 1
            self._explain(leaves)
            return self.plain(*arguments, **keywords)
        self.runs += count
        with torch.no_grad():
            if count == 1:
                return self.program(*arguments)
            return self._run_each(leaves, structure, count)

    def _run_each(self, leaves: list[Any], structure: TreeSpec, count: int) -> Any:
        rows = []
        for index in range(count):
            row = [x[index : index + 1] if isinstance(x, Tensor) else x for x in leaves]
            found, form = tree_flatten(self.program(*tree_unflatten(row, structure)))
            rows.append(found)
        joined = [
            torch.cat(parts, dim=axis or 0)
            for parts, axis in zip(zip(*rows, strict=True), self._batch_axes, strict=True)
        ]
        return tree_unflatten(joined, form)

    def _count_images(self, leaves: list[Any], structure: TreeSpec) -> int | None:
        """Returns how many images there are; None if the program does not fit."""
        if structure != self._structure:
            return None
        counts = set()
        for leaf, model, sides in zip(leaves, self._leaves, self._ranges, strict=True):
            if not isinstance(model, Tensor):
                if leaf is not model and leaf != model:
                    return None
                continue
            if not isinstance(leaf, Tensor) or leaf.requires_grad or not _alike(leaf, model):
                return None
            if sides is None:
                if leaf.shape[1:] != model.shape[1:]:
                    return None
            elif leaf.shape[-2] not in sides[0] or leaf.shape[-1] not in sides[1]:
                return None
            counts.add(len(leaf))
        count = counts.pop() if len(counts) == 1 else 0
        return count if count == 1 or (count > 1 and self._can_join) else None

    @property
    def _can_join(self) -> bool:
        return all(axis is not None for axis in self._batch_axes)

    def _explain(self, leaves: list[Any]) -> None:
        if self._has_told:
            return
        self._has_told = True
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        self._tell(
            f"the program of the {self._name} was not made for {shapes}: such inputs take the "
            "plain form, which is slower"
        )


def strip_defaults(arguments: Arguments) -> Arguments:
    """Leaves out Nones at the end, which say what is left out says."""
    while arguments and arguments[-1] is None:
        arguments = arguments[:-1]
    return arguments


def find_batch_axes(part: nn.Module, arguments: Arguments) -> list[int | None]:
    """Returns for each tensor of a part's outputs the axis along which images are stacked.

    Args:
        part: run with one image and with two.
        arguments: of one image.
    """
    leaves, structure = tree_flatten(arguments)
    doubled = [torch.cat([x, x]) if isinstance(x, Tensor) else x for x in leaves]
    one, _ = tree_flatten(part(*arguments))
    two, _ = tree_flatten(part(*tree_unflatten(doubled, structure)))
    return [_axis_of(a, b) for a, b in zip(one, two, strict=True)]


def _axis_of(one: Any, two: Any) -> int | None:
    if not isinstance(one, Tensor) or one.dim() != two.dim():
        return None
    grown = [i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and two.shape[grown[0]] == 2 else None


def _alike(leaf: Tensor, model: Tensor) -> bool:
    return leaf.dtype == model.dtype and leaf.device == model.device and leaf.dim() == model.dim()

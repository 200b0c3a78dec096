# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What became of every tensor of a file and of the model, in one line for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .class_rows import ClassChange


@dataclass(frozen=True)
class GroupReport:
    """One part of the model, such as its backbone: how its tensors were filled.

    ``misfits`` have a partner of another shape in the file, ``missing`` have none.
    """

    num_loaded: int
    adapted: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()

    @property
    def num_tensors(self) -> int:
        """All that the part has, without those that may be missing unharmed."""
        return self.num_loaded + len(self.adapted) + len(self.missing) + len(self.misfits)

    @property
    def num_filled(self) -> int:
        """Tensors taken from the file, as they are or adapted."""
        return self.num_loaded + len(self.adapted)

    @property
    def is_new(self) -> bool:
        """Whether the file has nothing for this part."""
        return not self.num_filled and not self.misfits

    @property
    def is_full(self) -> bool:
        """Whether every tensor of the part is taken from the file."""
        return self.num_filled == self.num_tensors

    def describe(self, name: str) -> str:
        """Returns the part's piece of the line."""
        if self.is_new:
            return f"{name}: new, {self.num_tensors} tensors"
        if not self.adapted and not self.misfits:
            return f"{self.num_filled}/{self.num_tensors} {name} tensors"
        shapes = f", {len(self.misfits)} of another shape" if self.misfits else ""
        counts = f"{len(self.adapted)} adapted, {len(self.missing)} missing{shapes}"
        return f"{name}: {counts}, {self.num_loaded} as stored"


@dataclass(frozen=True)
class LoadReport:
    """The outcome of fitting a file into a model.

    ``groups`` are the model's parts by name; ``left_over`` the file's tensors without a place, and
    ``spare`` those of parts that the model's config leaves out; ``pretrain_only_modules`` names the parts of
    the file that are of no use to this model, and were not looked at; ``class_change`` is None
    where the classes agree or are not known; ``note`` is a sentence more.
    """

    file: str
    num_stored: int
    groups: Mapping[str, GroupReport]
    left_over: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    pretrain_only_modules: tuple[str, ...] = ()
    class_change: ClassChange | None = None
    note: str = ""

    def __str__(self) -> str:
        parts = [group.describe(name) for name, group in self.groups.items() if group.num_tensors]
        parts += [_count(self.left_over, "left over"), _count(self.spare, "not used by the model")]
        if self.pretrain_only_modules:
            parts.append(f"left behind by rule: {', '.join(self.pretrain_only_modules)}")
        lines = ["; ".join(filter(None, parts))]
        lines += [str(self.class_change)] if self.class_change else []
        return "\n".join([*lines, self.note] if self.note else lines)

    @property
    def num_placed(self) -> int:
        """Tensors of the file that are in the model now."""
        return sum(group.num_filled for group in self.groups.values())

    @property
    def is_of_another_architecture(self) -> bool:
        """Whether so little fits that this can be but an accident of names and shapes."""
        full = any(group.is_full and not group.is_new for group in self.groups.values())
        return not self.num_placed or (2 * self.num_placed < self.num_stored and not full)

    def find_faults(self, *, new_parts: bool) -> list[str]:
        """Names what keeps the file from filling the model.

        Args:
            new_parts: whether the file may lack whole parts of the model, and hold some that the
                model leaves out.

        Returns:
            Phrases; none where all that the file promises found its place.
        """
        groups = [g for g in self.groups.values() if not (new_parts and g.is_new)]
        missing = [name for group in groups for name in group.missing]
        misfits = [name for group in groups for name in group.misfits]
        unexpected = self.left_over if new_parts else (*self.left_over, *self.spare)
        faults = [
            _count(missing, "missing"),
            _count(unexpected, "unexpected"),
            _count(misfits, "of another shape"),
        ]
        return [fault for fault in faults if fault]


def _count(names: Sequence[str], what: str) -> str:
    first = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} {what} ({first})" if names else ""

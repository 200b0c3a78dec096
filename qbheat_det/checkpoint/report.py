# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What became of every tensor of a file and of a model in loading, as one log line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first


@dataclass(frozen=True)
class ClassChange:
    """Classes of a file (``old``) and of a model (``now``), in contiguous order."""

    old: tuple[str, ...]
    now: tuple[str, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """Classes of both, in the model's order."""
        return tuple(name for name in self.now if name in self.old)

    def __str__(self) -> str:
        new = [name for name in self.now if name not in self.old]
        dropped = [name for name in self.old if name not in self.now]
        groups = {"kept by name": self.kept, "new": new, "dropped": dropped}
        parts = (f"{what} ({len(n)}): {', '.join(n) or '-'}" for what, n in groups.items())
        return f"classes {'; '.join(parts)}"


@dataclass
class GroupReport:
    """How the tensors of one part of the model, such as its backbone, were filled.

    ``num_loaded`` counts all tensors from the file, ``num_adapted`` the class layers among them
    whose rows were taken by name. ``missing`` have no partner in the file, ``mismatched`` one of
    another shape. Optional tensors that the file lacks are left out.
    """

    num_loaded: int = 0
    num_adapted: int = 0
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    @property
    def num_tensors(self) -> int:
        """All tensors of the part."""
        return self.num_loaded + len(self.missing) + len(self.mismatched)

    @property
    def is_new(self) -> bool:
        """Whether the file has nothing for this part."""
        return not self.num_loaded and not self.mismatched

    @property
    def is_full(self) -> bool:
        """Whether every tensor of the part is taken from the file."""
        return self.num_loaded == self.num_tensors


@dataclass(frozen=True)
class LoadReport:
    """Outcome of matching a file with a model, whose parts are ``groups`` by name.

    ``unexpected`` are names in the file that the model does not have, and ``unused`` those of
    modules that its config leaves out; ``skipped`` are children that this model does not load.
    """

    file: str
    num_stored: int
    groups: Mapping[str, GroupReport]
    unexpected: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    class_change: ClassChange | None = None
    note: str = ""

    def __str__(self) -> str:
        parts = []
        for name, group in self.groups.items():
            adapted = f" ({group.num_adapted} adapted)" if group.num_adapted else ""
            if group.num_tensors and group.is_new:
                parts.append(f"{name}: new, {group.num_tensors} tensors")
            elif group.num_tensors:
                parts.append(f"{group.num_loaded}/{group.num_tensors} {name} tensors{adapted}")
        parts += [_count(self.unexpected, "unexpected"), _count(self.unused, "not used")]
        parts += [f"skipped: {', '.join(self.skipped)}"] if self.skipped else []
        lines = ["; ".join(filter(None, parts)), str(self.class_change or ""), self.note]
        return "\n".join(filter(None, lines))

    @property
    def num_loaded(self) -> int:
        """Tensors of the model that the file fills."""
        return sum(group.num_loaded for group in self.groups.values())

    def find_errors(self, *, new_parts: bool) -> list[str]:
        """Lists what keeps the file from filling the model.

        With ``new_parts`` the file may lack whole parts of the model, and hold ``unused`` ones.
        """
        groups = [g for g in self.groups.values() if not (new_parts and g.is_new)]
        errors = [
            _count([name for group in groups for name in group.missing], "missing"),
            _count(self.unexpected + (() if new_parts else self.unused), "unexpected"),
            _count([name for group in groups for name in group.mismatched], "of another shape"),
        ]
        return [error for error in errors if error]


def check_complete(report: LoadReport, *, allow_partial: bool = False) -> None:
    """Raises a ``UserError`` unless a file fills all parts of a model that it has tensors for.

    With ``allow_partial``, only if so little fits that the file is of another architecture.
    """
    problems = report.find_errors(new_parts=True)
    errors = "; ".join([*problems, *filter(None, [report.note])])
    has_full_part = any(group.is_full and not group.is_new for group in report.groups.values())
    is_little = 2 * report.num_loaded < report.num_stored and not has_full_part
    if is_little or not report.num_loaded:
        raise UserError(
            f"'{report.file}' is of another architecture: {report.num_loaded} of its "
            f"{report.num_stored} tensors fit the model ({errors})"
        )
    if problems and not allow_partial:
        raise UserError(
            f"'{report.file}' does not fit the model: {errors}; use the weights' own config, or "
            "load what fits with --allow-partial"
        )


def check_exact(report: LoadReport, advice: str) -> None:
    """Raises a ``UserError`` unless a file fills the whole model and is of the same classes."""
    change = report.class_change
    if change is not None:
        raise UserError(
            f"'{report.file}' was trained on the classes {list(change.old)}, but the model's are "
            f"{list(change.now)}; {advice}"
        )
    if errors := report.find_errors(new_parts=False):
        raise UserError(
            f"'{report.file}' does not fit the model of the config: {'; '.join(errors)}; {advice}"
        )


def _count(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what} ({join_first(names)})" if names else ""

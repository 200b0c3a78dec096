# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reports which tensors of a file were loaded into a model, in a form for the log."""

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
        """Classes that file and model share, in the model's order."""
        return tuple(name for name in self.now if name in self.old)

    def __str__(self) -> str:
        new = [name for name in self.now if name not in self.old]
        dropped = [name for name in self.old if name not in self.now]
        groups = {"kept by name": self.kept, "new": new, "dropped": dropped}
        parts = [f"{what} ({len(n)}): {', '.join(n) or '-'}" for what, n in groups.items()]
        return f"classes {'; '.join(parts)}"


@dataclass
class GroupReport:
    """Reports how the tensors of one part of the model, such as its backbone, were loaded.

    ``num_loaded`` counts the tensors from the file. ``missing`` lists tensors that the file lacks.
    ``mismatched`` lists tensors of another shape. Optional tensors that the file lacks are not
    listed.
    """

    num_loaded: int = 0
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    @property
    def num_tensors(self) -> int:
        """Number of all tensors of the part."""
        return self.num_loaded + len(self.missing) + len(self.mismatched)

    @property
    def is_new(self) -> bool:
        """Whether the file has no tensor for this part."""
        return not self.num_loaded and not self.mismatched


@dataclass(frozen=True)
class LoadReport:
    """Result of matching a weights file with a model.

    ``groups`` has a report for each part of the model. ``unexpected`` lists names in the file that
    the model does not have. ``unused`` lists names in modules that the model's config disables.
    ``skipped`` lists child modules whose tensors in the file are not loaded.
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
            if group.num_tensors and group.is_new:
                parts.append(f"{name}: new, {group.num_tensors} tensors")
            elif group.num_tensors:
                parts.append(f"{group.num_loaded}/{group.num_tensors} {name} tensors")
        parts.append(_count(self.unexpected, "unexpected"))
        parts.append(_count(self.unused, "not used"))
        if self.skipped:
            parts.append(f"skipped: {', '.join(self.skipped)}")
        lines = ["; ".join(filter(None, parts)), str(self.class_change or ""), self.note]
        return "\n".join(filter(None, lines))

    @property
    def num_loaded(self) -> int:
        """Number of tensors of the model that are loaded from the file."""
        return sum(group.num_loaded for group in self.groups.values())

    def find_errors(self, *, new_parts: bool) -> list[str]:
        """Lists the reasons why the file and the model do not match.

        With ``new_parts``, it is no error if the file lacks whole parts of the model, or has
        tensors in ``unused``.
        """
        groups = list(self.groups.values())
        unexpected = self.unexpected + self.unused
        if new_parts:
            groups = [group for group in groups if not group.is_new]
            unexpected = self.unexpected
        errors = [
            _count([name for group in groups for name in group.missing], "missing"),
            _count(unexpected, "unexpected"),
            _count([name for group in groups for name in group.mismatched], "of another shape"),
        ]
        return [error for error in errors if error]


def check_complete(report: LoadReport, *, allow_partial: bool = False) -> None:
    """Raises a ``UserError`` if a file has unexpected tensors, or only some of a part's tensors.

    With ``allow_partial``, raises it only if so few tensors fit that the file must be of a
    different architecture.
    """
    problems = report.find_errors(new_parts=True)
    errors = "; ".join([*problems, *filter(None, [report.note])])
    has_full_part = any(
        group.num_loaded > 0 and group.num_loaded == group.num_tensors
        for group in report.groups.values()
    )
    fits_little = 2 * report.num_loaded < report.num_stored and not has_full_part
    if fits_little or not report.num_loaded:
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
    """Raises a ``UserError``, which ends with ``advice``, if tensors or classes differ."""
    change = report.class_change
    if change is not None:
        raise UserError(
            f"'{report.file}' was trained on the classes {list(change.old)}, but the model's are "
            f"{list(change.now)}; {advice}"
        )
    errors = report.find_errors(new_parts=False)
    if errors:
        raise UserError(
            f"'{report.file}' does not fit the model of the config: {'; '.join(errors)}; {advice}"
        )


def _count(names: Sequence[str], what: str) -> str:
    if not names:
        return ""
    return f"{len(names)} {what} ({join_first(names)})"

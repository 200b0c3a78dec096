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

    @property
    def dropped(self) -> tuple[str, ...]:
        """Classes of the file that the model does not have."""
        return tuple(name for name in self.old if name not in self.now)

    def __str__(self) -> str:
        new = [name for name in self.now if name not in self.old]
        parts = []
        for title, names in (("kept by name", self.kept), ("new", new), ("dropped", self.dropped)):
            parts.append(f"{title} ({len(names)}): {', '.join(names) or '-'}")
        return f"classes {'; '.join(parts)}"


@dataclass
class GroupReport:
    """Reports how the tensors of one part of the model, such as its backbone, were loaded.

    Attributes:
        num_loaded: number of tensors that are loaded from the file.
        missing: names of tensors that the file lacks, without the optional ones.
        mismatched: names and shapes of tensors that have another shape in the file.
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

    Attributes:
        file: path of the file.
        num_stored: number of tensors in the file, without those in ``skipped``.
        groups: a report for each part of the model, by the name of the part.
        unexpected: names in the file that the model does not have.
        unused: names in the file of modules that the model's config disables.
        skipped: child modules, such as a decoder for pre-training, that are not loaded.
        class_change: how the classes differ; None if they are equal or unknown.
        note: a remark for the log and for errors, or "".
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
        if self.unexpected:
            parts.append(_count(self.unexpected, "unexpected"))
        if self.unused:
            parts.append(_count(self.unused, "not used"))
        if self.skipped:
            parts.append(f"skipped: {', '.join(self.skipped)}")
        lines = ["; ".join(parts), str(self.class_change or ""), self.note]
        return "\n".join(line for line in lines if line)

    @property
    def num_loaded(self) -> int:
        """Number of tensors of the model that are loaded from the file."""
        return sum(group.num_loaded for group in self.groups.values())

    def find_errors(self, *, new_parts: bool) -> list[str]:
        """Lists the reasons why the file and the model do not match; empty if they match.

        Args:
            new_parts: whether the model may have parts that the file lacks as a whole. Tensors in
                ``unused`` are then allowed too.
        """
        missing: list[str] = []
        mismatched: list[str] = []
        for group in self.groups.values():
            if group.is_new and new_parts:
                continue
            missing += group.missing
            mismatched += group.mismatched
        unexpected = self.unexpected
        if not new_parts:
            unexpected = self.unexpected + self.unused
        errors = []
        if missing:
            errors.append(_count(missing, "missing"))
        if unexpected:
            errors.append(_count(unexpected, "unexpected"))
        if mismatched:
            errors.append(_count(mismatched, "of another shape"))
        return errors


def check_complete(report: LoadReport, *, allow_partial: bool = False) -> None:
    """Raises a ``UserError`` if a file has unexpected tensors, or only some of a part's tensors.

    With ``allow_partial``, raises it only if the file is of a different architecture. This is
    assumed if no part of the model is complete, and less than half of the file's tensors fit.
    """
    problems = report.find_errors(new_parts=True)
    details = list(problems)
    if report.note:
        details.append(report.note)
    errors = "; ".join(details)
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
    """Returns text such as "2 missing (a.weight, a.bias)"."""
    return f"{len(names)} {what} ({join_first(names)})"

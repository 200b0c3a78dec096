# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A new entry of the model zoo: the file that travels, and all that the index says of it."""

import dataclasses
import datetime
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qbheat_det.checkpoint import WeightsInfo, load_run_config, read_weights, save_weights
from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.engine.run_record import find_commit
from qbheat_det.model_zoo import index, places
from qbheat_det.model_zoo.download import hash_file
from qbheat_det.model_zoo.fingerprint import compute_fingerprint
from qbheat_det.model_zoo.index import Figure, ZooEntry, file_of

from .light_weights import forget_machine, halve_precision
from .trained_model import TrainedModel, count_costs, open_trained

MAX_SHIPPED = 40_000_000
"""Bytes of all weights that travel with the package."""


@dataclass(frozen=True)
class Origin:
    """What a file of weights cannot say of itself.

    Attributes:
        summary: one line.
        config: the recipe that it was trained by, a path below ``configs/``.
        data: what it was trained on.
        data_licence: of that data.
        command: what trained it.
        licence: of the weights.
        commit: the revision that trained it; empty takes what the file says, else the present one.
        date: YYYY-MM-DD; empty takes today.
    """

    summary: str
    config: str
    data: str
    data_licence: str
    command: str
    licence: str = "Apache-2.0"
    commit: str = ""
    date: str = ""


@dataclass(frozen=True)
class Shelf:
    """A folder of weights and the index that knows them."""

    folder: Path
    index: Path

    @classmethod
    def of(cls, folder: Path | None) -> "Shelf":
        """Returns the package's own, or a folder that ``$QBHEAT_ZOO`` can name."""
        if folder is None:
            return cls(places.SHIPPED, index.INDEX_FILE)
        return cls(folder, folder / index.INDEX_FILE.name)

    @property
    def is_shipped(self) -> bool:
        """Whether it travels with the package."""
        return self.folder == places.SHIPPED

    def entries(self) -> list[ZooEntry]:
        """Returns what its index knows; nothing where there is none yet."""
        return list(index.load_index(self.index)) if self.index.exists() else []


def add_entry(
    weights: str,
    name: str,
    origin: Origin,
    *,
    figures: Sequence[Figure] = (),
    measure: Callable[[Path], Sequence[Figure]] | None = None,
    output: Path | None = None,
    replace: bool = False,
) -> ZooEntry:
    """Writes a file of weights in half precision, and its entry into the index beside it.

    The fingerprint and all figures that ``measure`` gives are those of the file as written. Where
    anything goes wrong, neither file nor index has changed.

    Args:
        weights: of a trained model or a bare backbone, with its config inside or beside it.
        name: of the entry.
        origin: what the file cannot say.
        figures: measured by hand.
        measure: measures more of them from a file.
        output: a folder with an index of its own; None ships the file with the package.
        replace: whether there may be an entry of that name.

    Raises:
        UserError: the weights cannot be read or do not fill their model, the name is taken, a
            field is not sound, or what is shipped would be too large.
    """
    shelf = Shelf.of(output)
    others = _others(shelf, name, replace=replace)
    file = file_of(name)
    get_config_path(origin.config)
    with tempfile.TemporaryDirectory() as folder:
        light = Path(folder) / file
        commit = _write_light(weights, light)
        trained = open_trained(str(light))
        entry = _describe(name, light, trained, origin, commit=commit)
        entry = dataclasses.replace(entry, figures=tuple(figures))
        index.render_index([*others, entry], shelf.index)  # refused before what takes long
        if shelf.is_shipped:
            _check_shipped([*others, entry])
        entry = dataclasses.replace(
            entry,
            fingerprint=compute_fingerprint(trained.model, trained.cfg),
            figures=(*figures, *(measure(light) if measure else ())),
        )
        index.render_index([*others, entry], shelf.index)  # nothing is written that it refuses
        content = light.read_bytes()
    _write(shelf, file, content, [*others, entry])
    return entry


def _write(shelf: Shelf, file: str, content: bytes, entries: Sequence[ZooEntry]) -> None:
    """Writes weights, then the index; where the second fails, the first is as it was."""
    target = shelf.folder / file
    before = target.read_bytes() if target.is_file() else None
    write_atomically(target, lambda stream: stream.write(content))
    try:
        index.save_index(entries, shelf.index)
    except BaseException:
        if before is None:
            target.unlink(missing_ok=True)
        else:
            write_atomically(target, lambda stream: stream.write(before))
        raise


def _others(shelf: Shelf, name: str, *, replace: bool) -> list[ZooEntry]:
    entries = shelf.entries()
    names = {entry.name for entry in entries}
    if name in names and not replace:
        raise UserError(f"'{name}' is in '{shelf.index}' already: ask for it with --replace")
    shipped = set() if shelf.is_shipped else {one.file.lower() for one in index.load_index()}
    if file_of(name).lower() in shipped:
        raise UserError(f"'{name}' is an entry of the package itself: choose another name")
    return [entry for entry in entries if entry.name != name]


def _write_light(weights: str, target: Path) -> str:
    """Writes the file that travels; returns the commit that the weights name, or "" ."""
    state, info = read_weights(weights)
    cfg = load_run_config(weights, device="cpu")
    info = info or WeightsInfo.from_config(cfg, iteration=0, commit="")
    save_weights(str(target), halve_precision(state), forget_machine(info, cfg))
    return info.commit


def _describe(
    name: str, file: Path, trained: TrainedModel, origin: Origin, *, commit: str
) -> ZooEntry:
    commit = origin.commit or commit or find_commit()
    clean = commit.removesuffix("-dirty")
    costs = count_costs(trained)
    return ZooEntry(
        name=name,
        task=trained.task,
        summary=origin.summary,
        config=origin.config,
        file=file.name,
        sha256=hash_file(file),
        size=file.stat().st_size,
        num_params=costs.num_params,
        madds=costs.madds,
        madds_input=costs.madds_input,
        data=origin.data,
        data_licence=origin.data_licence,
        licence=origin.licence,
        command=origin.command + ("" if clean == commit else "  # with changes to that commit"),
        commit=clean,
        date=origin.date or datetime.date.today().isoformat(),
    )


def _check_shipped(entries: Sequence[ZooEntry]) -> None:
    here = [entry for entry in entries if (places.SHIPPED / entry.file).is_file()]
    total = sum(entry.size for entry in {*here, entries[-1]})
    if total > MAX_SHIPPED:
        raise UserError(
            f"with '{entries[-1].name}' the weights in the package would be {total / 1e6:.1f} MB, "
            f"but may be {MAX_SHIPPED / 1e6:.0f} MB: write it elsewhere with --output, or take "
            "another one out"
        )

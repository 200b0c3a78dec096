# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A run, weights or figures, as something to look at: each part is read when it is wanted."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from torch import nn

from qbheat_det.analysis.charts import read_metrics
from qbheat_det.analysis.run import PROBE_FILES as FILES
from qbheat_det.checkpoint import load_run_config, local_weights
from qbheat_det.core.errors import UserError
from qbheat_det.data import MAPPERS_OF_CLASSES, MAPPERS_OF_IMAGES, build_mapper, load_image_folders
from qbheat_det.engine.predict import build_predictor
from qbheat_det.engine.sample_images import read_spread

from .refusal import NothingToSee as NothingToSee  # builders take both from here
from .run_sets import Split, find_run_set

Kind = Literal["pretraining", "detector", "classifier"]

_FINAL = ("model_final.safetensors", "model_final.pth")
_SIGNS = ("config.yaml", "metrics.json", "last_checkpoint", *_FINAL)
_SUFFIXES = (".safetensors", ".pth")


class Subject:
    """What is looked at.

    Attributes:
        label: a short name for legends and headings.
        path: as it was named.
        folder: ``OUTPUT_DIR`` of a run; None for a file.
        figures: file of figures of probes; None where there is none. A subject without folder and
            weights is nothing but these.
    """

    def __init__(
        self,
        *,
        label: str,
        path: Path,
        folder: Path | None,
        weights: Path | None,
        figures: Path | None,
        config_file: str | None,
        device: str | None,
        opts: Sequence[str],
    ) -> None:
        """Use ``open``.

        Args:
            label: see above.
            path: see above.
            folder: see above.
            weights: file; None where the run has none yet.
            figures: see above.
            config_file: as of ``load_run_config``.
            device: as of ``load_run_config``.
            opts: as of ``load_run_config``.
        """
        self.label = label
        self.path = path
        self.folder = folder
        self.figures = figures
        self._weights = weights
        self._config_file = config_file
        self._device = device
        self._opts = tuple(opts)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        label: str | None = None,
        config_file: str | None = None,
        device: str | None = None,
        opts: Sequence[str] = (),
    ) -> "Subject":
        """Finds a run or weights; reads nothing of them yet.

        Args:
            path: folder of a run (its ``OUTPUT_DIR``), or weights (``.safetensors``, ``.pth``, an
                address such as ``qbheat://NAME``). Of a folder the weights are ``model_final``,
                or else the last checkpoint. Or figures of probes alone (``.json``), or the folder
                of a comparison of objectives.
            label: for legends; None takes the names of folder and file.
            config_file: YAML of the model; None takes ``config.yaml`` of the run, or the config
                that weights hold or have beside them.
            device: "cpu" or "cuda"; None takes the GPU where there is one.
            opts: alternating keys and values that override the config.

        Raises:
            UserError: there is no such file, it cannot be fetched, or the folder is not that of a
                run.
        """
        if "://" in str(path):
            address = str(path)
            path, label = local_weights(address), label or address.partition("://")[2]
        given = Path(path)
        found = _find_in_folder(given) if given.is_dir() else _find_file(given)
        own_config = given / "config.yaml"
        if config_file is None and own_config.is_file():
            config_file = str(own_config)
        return cls(
            label=label or found.name,
            path=given,
            folder=found.folder,
            weights=found.weights,
            figures=found.figures,
            config_file=config_file,
            device=device,
            opts=opts,
        )

    @property
    def has_figures_alone(self) -> bool:
        """Whether there is neither a run nor weights, so that only "probes" has anything to see."""
        return self.folder is None and self._weights is None

    @property
    def weights(self) -> Path:
        """The file of weights.

        Raises:
            NothingToSee: the run has none yet, or there are figures of probes alone.
        """
        self._refuse_figures()
        if self._weights is None:
            raise NothingToSee(f"'{self.label}' has no checkpoint yet")
        return self._weights

    @cached_property
    def cfg(self) -> CfgNode:
        """The config, ``MODEL.WEIGHTS`` and ``OUTPUT_DIR`` being those of here.

        Raises:
            NothingToSee: there are figures of probes alone.
            UserError: there is none, or it is not sound.
        """
        self._refuse_figures()
        weights = str(self._weights or "")
        if not weights and self._config_file is None:
            raise UserError(f"'{self.folder}' has neither config.yaml nor weights: name the "
                            "config with --config-file")  # fmt: skip
        cfg = load_run_config(weights, self._config_file, device=self._device, opts=self._opts)
        if self.folder is not None:  # it may have been moved since
            cfg.OUTPUT_DIR = str(self.folder)
        return cfg

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Records of ``metrics.json``; none for weights, and where the file is missing."""
        path = self.folder / "metrics.json" if self.folder is not None else None
        if path is None or not path.is_file():
            return []
        return [record for record in read_metrics(path) if isinstance(record, dict)]

    @cached_property
    def model(self) -> nn.Module:
        """The model with exactly these weights, frozen and in eval mode, on ``MODEL.DEVICE``.

        A pre-trained one has all its parts: predictor and decoder too.

        Raises:
            NothingToSee: the run has no checkpoint yet.
            UserError: the weights cannot be read, or are not those of the config's model.
        """
        _ = self.weights  # a sentence of its own where there are none
        model: nn.Module = build_predictor(self.cfg).model
        return model.eval().requires_grad_(False)

    @property
    def kind(self) -> Kind:
        """What the model is for.

        Raises:
            UserError: as ``cfg``.
        """
        mapper = self.cfg.INPUT.DATASET_MAPPER_NAME
        if mapper in MAPPERS_OF_CLASSES:
            return "classifier"
        return "pretraining" if mapper in MAPPERS_OF_IMAGES else "detector"

    def find_set(self, split: Split = "test") -> str:
        """Returns the name under which the run's data are registered here, see ``find_run_set``.

        Raises:
            NothingToSee: the run had none, or they are not here.
        """
        beside = self.folder if self.folder is not None else self.weights.parent
        return find_run_set(self.cfg, beside, split)

    def load_entries(self, number: int, images: Path | None = None) -> list[dict[str, Any]]:
        """Returns what the run's mapper makes in inference of pictures, spread evenly over all.

        Args:
            number: how many; all, where there are fewer.
            images: folder to take them from, with all that is below it; None takes the run's test
                set, or else its training set.

        Raises:
            NothingToSee: no folder is given, and the run's data are not here.
            UserError: the folder holds no image, or none of the images can be read.
        """
        records, source = self._list_records(images)
        entries = read_spread(records, build_mapper(self.cfg, is_train=False), number)
        if not entries:
            raise UserError(f"{source} has no image that can be read")
        return entries

    def _refuse_figures(self) -> None:
        if self.has_figures_alone:
            raise NothingToSee(f"'{self.label}' has figures of probes alone, and no model")

    def _list_records(self, images: Path | None) -> tuple[list[dict[str, Any]], str]:
        if images is not None:
            return load_image_folders([images])[0], f"'{images}'"
        reasons = []
        splits: tuple[Split, Split] = ("test", "train")
        for split in splits:
            try:
                name = self.find_set(split)
            except NothingToSee as reason:
                reasons.append(str(reason))
            else:
                return DatasetCatalog.get(name), f"the data set '{name}'"
        raise NothingToSee(
            f"no pictures for '{self.label}' ({'; '.join(reasons)}): name a folder with --images"
        )


def open_subjects(
    paths: Sequence[str],
    *,
    config_file: str | None = None,
    device: str | None = None,
    opts: Sequence[str] = (),
) -> list[Subject]:
    """Opens several runs or weights, so that no two have the same label.

    Args:
        paths: as of ``Subject.open``; ``LABEL=PATH`` gives one a label.
        config_file: of all of them.
        device: of all of them.
        opts: of all of them.

    Raises:
        UserError: as ``Subject.open``; or two have the same label, given or not.
    """
    subjects, unnamed = [], []
    for path in paths:
        before, equals, behind = path.partition("=")
        label, where = (before, behind) if equals and not Path(path).exists() else ("", path)
        subjects.append(
            Subject.open(
                where, label=label or None, config_file=config_file, device=device, opts=opts
            )
        )
        if not label:
            unnamed.append(subjects[-1])
    _lengthen(unnamed)
    labels = [subject.label for subject in subjects]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise UserError(f"two runs are called '{twice}': give them labels, as in LABEL=PATH")
    return subjects


def _lengthen(subjects: Sequence[Subject]) -> None:
    """Puts parent folders before labels that are alike, until they are not."""
    while True:
        labels = [subject.label for subject in subjects]
        alike = [subject for subject in subjects if labels.count(subject.label) > 1]
        longer = [_put_parent_before(subject) for subject in alike]
        if longer == [subject.label for subject in alike]:  # all unlike, or the same path twice
            return
        for subject, label in zip(alike, longer, strict=True):
            subject.label = label


def _put_parent_before(subject: Subject) -> str:
    path = subject.path.resolve()
    parts = path.parts if path.is_dir() else path.with_suffix("").parts
    number = subject.label.count("/") + 2
    return "/".join(parts[-number:]) if number < len(parts) else subject.label


class _Found(NamedTuple):
    """What a path holds that something can be seen of; the name is for legends."""

    name: str
    folder: Path | None = None
    weights: Path | None = None
    figures: Path | None = None


def _find_in_folder(given: Path) -> _Found:
    figures = next((given / name for name in FILES if (given / name).is_file()), None)
    is_run = any((given / sign).exists() for sign in _SIGNS)
    if not is_run and figures is None:
        raise UserError(
            f"'{given}' is no folder of a run, which holds config.yaml, metrics.json and "
            "checkpoints: name an OUTPUT_DIR, or weights (.safetensors, .pth)"
        )
    folder = given if is_run else None
    return _Found(given.resolve().name, folder, _find_weights(given), figures)


def _find_file(given: Path) -> _Found:
    if not given.is_file():
        raise UserError(f"'{given}' does not exist: name the OUTPUT_DIR of a run, or weights")
    name = f"{given.resolve().parent.name}/{given.stem}"
    if given.suffix in _SUFFIXES:
        return _Found(name, weights=given)
    if given.suffix == ".json":
        return _Found(name, figures=given)
    raise UserError(
        f"'{given}' is neither a run's folder nor weights ({', '.join(_SUFFIXES)}), nor figures "
        "of probes (.json)"
    )


def _find_weights(folder: Path) -> Path | None:
    for name in _FINAL:
        if (folder / name).is_file():
            return folder / name
    tag = folder / "last_checkpoint"
    try:
        named = folder / Path(tag.read_text(encoding="utf-8").strip()).name
    except (OSError, ValueError):
        return None
    return named if named.is_file() else None

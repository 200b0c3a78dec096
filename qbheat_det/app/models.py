# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The models that the page offers: those of the command line and of the zoo, and no others."""

import functools
from collections.abc import Sequence
from pathlib import Path

from qbheat_det.analysis.run import Kind, Run
from qbheat_det.api import Detector, load
from qbheat_det.model_zoo.api import get_address
from qbheat_det.model_zoo.index import find_entry, list_entries

_KINDS: dict[str, Kind] = {"detection": "detector", "pretraining": "pretraining"}  # by task


class Models:
    """What the page offers, opened when first used; the last two models of each kind are kept.

    Attributes:
        kinds: by label, the user's own models first.
    """

    def __init__(self, weights: Sequence[str] = (), *, device: str | None = None) -> None:
        """
        Args:
            weights: files, folders of runs or names in the zoo, beside all of the zoo's entries.
            device: "cpu" or "cuda"; None takes the GPU if there is one.

        Raises:
            UserError: a file, folder or entry does not exist.
        """
        self.kinds: dict[str, Kind] = {}
        self._places: dict[str, str] = {}
        self._device = device
        for name in weights:
            if Path(name).exists():
                run = Run.open(name)
                self._add(run.label, str(run.weights), run.kind)
            else:
                self._add_entry(name)
        # QB-Heat first: only it reconstructs. Of timm's encoders there is nothing to draw.
        for entry in sorted(list_entries(), key=lambda entry: "qb_heat" not in entry.config):
            if entry.distribution is None:
                self._add_entry(entry.name)
        self.open_detector = functools.lru_cache(maxsize=2)(self._open_detector)
        self.open_run = functools.lru_cache(maxsize=2)(self._open_run)

    def list_detectors(self) -> list[str]:
        """Returns the labels of the models that find boxes."""
        return [label for label, kind in self.kinds.items() if kind == "detector"]

    def _add_entry(self, name: str) -> None:
        entry = find_entry(name)
        self._add(entry.name, get_address(entry.name), _KINDS.get(entry.task, "classifier"))

    def _add(self, label: str, place: str, kind: Kind) -> None:
        self.kinds.setdefault(label, kind)
        self._places.setdefault(label, place)

    def _open_detector(self, label: str) -> Detector:
        detector = load(self._places[label], device=self._device)
        assert isinstance(detector, Detector)
        return detector

    def _open_run(self, label: str) -> Run:
        return Run.open(self._places[label], label=label, device=self._device)

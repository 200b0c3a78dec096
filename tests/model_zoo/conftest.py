# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A zoo with sources of its own, apart from this machine's, and a server."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from detectron2.config import CfgNode
from torch import Tensor

from qbheat_det.model_zoo import ZooEntry, download, index, sources
from qbheat_det.model_zoo.index import save_index

from .servers import Served, serve
from .zoo_cases import save_tiny_backbone, save_tiny_detector

UseIndex = Callable[..., None]


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QBHEAT_ZOO", "QBHEAT_ZOO_URL", "QBHEAT_ZOO_HUB", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(download, "_PAUSE", 0.0)


@pytest.fixture
def use_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UseIndex:
    """Puts entries in the place of the package's own."""

    def use(*entries: ZooEntry) -> None:
        save_index(entries, tmp_path / "index.json")
        monkeypatch.setattr(index, "INDEX_FILE", tmp_path / "index.json")

    return use


@pytest.fixture
def served() -> Iterator[Served]:
    """A server that a test fills."""
    with serve(Served()) as started:
        yield started


@dataclass(frozen=True)
class TinyZoo:
    """A folder with two models.

    Attributes:
        folder: of the files.
        entries: of the detector and of the backbone.
        configs: by name.
        states: tensors in float32, by name.
    """

    folder: Path
    entries: tuple[ZooEntry, ...]
    configs: dict[str, CfgNode]
    states: dict[str, dict[str, Tensor]]


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> TinyZoo:
    """The files; they are not to be changed."""
    folder = tmp_path_factory.mktemp("tiny_zoo")
    cases = [save_tiny_detector(folder), save_tiny_backbone(folder)]
    states = {
        entry.name: {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
        for entry, _, state in cases
    }
    configs = {entry.name: cfg for entry, cfg, _ in cases}
    return TinyZoo(folder, tuple(entry for entry, *_ in cases), configs, states)


@pytest.fixture
def tiny(tiny_files: TinyZoo, use_index: UseIndex, monkeypatch: pytest.MonkeyPatch) -> TinyZoo:
    """A zoo of a tiny detector and a tiny bare backbone."""
    use_index(*tiny_files.entries)
    monkeypatch.setenv("QBHEAT_ZOO", str(tiny_files.folder))
    configs = {name: cfg.clone() for name, cfg in tiny_files.configs.items()}
    return TinyZoo(tiny_files.folder, tiny_files.entries, configs, tiny_files.states)

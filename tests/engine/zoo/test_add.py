# Copyright (c) qbheat_det contributors. Apache-2.0.
"""New entries: what the file and the index hold, and that a refusal leaves nothing behind."""

import dataclasses
import datetime
import hashlib
import math
import pickle
from pathlib import Path

import pytest
import torch

import qbheat_det.model_zoo as zoo
import qbheat_det.model_zoo.add as add_module
from qbheat_det.analysis import CountingRule, count_madds
from qbheat_det.checkpoint import WeightsInfo, load_embedded_config, read_weights
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import Metric, ZooEntry, index
from qbheat_det.model_zoo.add import forget_machine, halve_precision
from qbheat_det.model_zoo.fingerprint import compute_fingerprint
from qbheat_det.modeling.backbone.bare import build_bare_backbone

from .conftest import NAME, ORIGIN, AddEntry, Trained


def test_matrices_are_halved_and_vectors_and_integers_are_not() -> None:
    state = {
        "conv.weight": torch.full((4, 3, 1, 1), 1 / 3),
        "bn.running_var": torch.tensor([1e-9, 1e6]),  # float16 makes 0 and infinity of them
        "bn.num_batches_tracked": torch.tensor(7),
        "scale": torch.tensor(0.1),
        "wild": torch.full((2, 2), 7e4),
        "was_half": torch.ones(2, dtype=torch.float16),
    }
    light = halve_precision(state)
    assert {name: tensor.dtype for name, tensor in light.items()} == {
        "conv.weight": torch.float16,
        "bn.running_var": torch.float32,
        "bn.num_batches_tracked": torch.int64,
        "scale": torch.float32,
        "wild": torch.float32,
        "was_half": torch.float32,
    }
    for name, tensor in light.items():
        expected = state[name].half() if name == "conv.weight" else state[name]
        torch.testing.assert_close(tensor.double(), expected.double(), rtol=0, atol=0)


def test_a_config_forgets_paths_of_every_kind_and_keeps_names(trained: Trained) -> None:
    cfg = trained.cfg.clone()
    cfg.MODEL.CLASS_NAMES = ["/", "file: a", ".."]
    cfg.MODEL.CACHE_FEATURES.FOLDER = "private"
    cfg.DATASETS.TRAIN = ("../../me", "shapes")
    cfg.TEST.KNN.TRAIN = ("file:///home/me",)
    cfg.TEST.KNN.VAL = ("\\\\server\\x",)
    cfg.INPUT.CLASSIFY.RAND_AUGMENT = [["/home/me"]]
    cfg.DATASETS.TEST = ("a..b", "c/d")
    info = WeightsInfo.from_config(cfg, iteration=7, commit="")
    found = load_embedded_config(forget_machine(info, cfg).config, "it")
    assert found.MODEL.CLASS_NAMES == ["/", "file: a", ".."]
    assert found.DATASETS.TEST == ("a..b", "c/d")
    for value in (
        *(found.MODEL.CACHE_FEATURES.FOLDER, found.DATASETS.TRAIN, found.TEST.KNN.TRAIN),
        *(found.TEST.KNN.VAL, found.INPUT.CLASSIFY.RAND_AUGMENT),
    ):
        assert not value


def test_the_file_is_light_and_names_no_path_and_the_index_says_what_it_is(
    add: AddEntry, shelf: Path, trained: Trained
) -> None:
    figures = (Metric("kNN top-1", 12.5, "%", "shapes val"),)
    entry = add(figures=figures)
    assert index.load_index() == (entry,)
    content = (shelf / "qb_heat-tiny_shapes.safetensors").read_bytes()
    assert (entry.sha256, entry.size) == (hashlib.sha256(content).hexdigest(), len(content))
    backbone = build_bare_backbone(trained.cfg).eval()
    assert entry.num_params == sum(p.numel() for p in backbone.parameters())
    madds = count_madds(backbone, torch.zeros(1, 3, 64, 64)).total(CountingRule.CORE)
    assert (entry.madds, entry.madds_input) == (madds, (64, 64))
    assert (entry.task, entry.figures) == ("pretraining", figures)
    assert entry.date == datetime.date.today().isoformat()
    assert entry.commit == "c0ffee12"
    assert entry.command == f"{ORIGIN.command}  # with changes to that commit"
    state, info = read_weights(str(shelf / entry.file))
    expected = halve_precision(trained.state)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    assert info is not None
    assert (info.iteration, info.pixel_format) == (7, trained.cfg.INPUT.FORMAT)
    for word in ("someone", "runs", "before"):
        assert word not in info.config
    assert info.value_of("OUTPUT_DIR") == get_cfg().OUTPUT_DIR
    # The fingerprint is that of the file, not of what it was made from.
    model = zoo.get(NAME, device="cpu")
    assert compute_fingerprint(model, zoo.get_config(NAME, trained=True)) == entry.fingerprint


@pytest.mark.usefixtures("quick")
def test_figures_are_measured_from_the_file_as_written(add: AddEntry, shelf: Path) -> None:
    seen = []

    def measure(path: Path) -> list[Metric]:
        seen.append(path.read_bytes())
        return [Metric("AP", 1.0, "%", "shapes val")]

    entry = add(measure=measure, figures=[Metric("speed", 2.0, "ms", "a CPU")])
    assert seen == [(shelf / entry.file).read_bytes()]
    assert [figure.metric for figure in entry.figures] == ["speed", "AP"]


@pytest.mark.usefixtures("quick")
def test_a_name_is_taken_once_unless_it_is_to_be_replaced(add: AddEntry) -> None:
    add()
    with pytest.raises(UserError, match=r"index\.json' already: ask for it with --replace"):
        add()
    other = dataclasses.replace(ORIGIN, summary="Another", commit="abcdef0", date="2026-01-02")
    entry = add(origin=other, replace=True)
    assert index.load_index() == (entry,)
    assert (entry.summary, entry.commit, entry.date) == ("Another", "abcdef0", "2026-01-02")
    assert entry.command == ORIGIN.command  # the commit was said by hand


@pytest.mark.usefixtures("quick")
def test_a_folder_has_an_index_of_its_own_and_is_a_place(
    add: AddEntry, tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = add(output=tmp_path / "mine")
    assert index.load_index() == ()
    assert not shelf.exists()
    monkeypatch.setenv("QBHEAT_ZOO", str(tmp_path / "mine"))
    assert zoo.find_entry(NAME) == entry
    assert zoo.get_checkpoint(NAME) == str(tmp_path / "mine" / entry.file)
    monkeypatch.delenv("QBHEAT_ZOO")
    add("qb_heat/own")
    with pytest.raises(UserError, match="'qb_heat/own' is an entry of the package itself"):
        add("qb_heat/own", output=tmp_path / "mine")
    with pytest.raises(UserError, match="'qb_heat/OWN' is an entry of the package itself"):
        add("qb_heat/OWN", output=tmp_path / "mine")


def _bare_pickle(folder: Path) -> Path:
    path = folder / "weights.pth"
    path.write_bytes(pickle.dumps({"model": print}))
    return path


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"origin": dataclasses.replace(ORIGIN, config="custom/none.yaml")}, "no config named"),
        ({"name": "Retina net"}, "can be no name in the model zoo"),
        ({"origin": dataclasses.replace(ORIGIN, summary="two\nlines")}, "'summary' is"),
        ({"origin": dataclasses.replace(ORIGIN, date="today")}, "today"),
        ({"weights": "none.pth"}, "'none.pth' does not exist"),
        ({"weights": "pickle"}, "cannot be read as PyTorch weights|is refused"),
        ({"too_large": True}, r"would be 0\.\d MB, but may be 0 MB: write it elsewhere with --out"),
        ({"figures": [Metric("AP", math.inf, "", "toy")]}, r"'figures'\[0\]: 'value' is inf"),
        ({"measure": lambda path: [Metric("AP", math.nan, "", "toy")]}, "'value' is nan"),
        ({"measure": lambda path: (_ for _ in ()).throw(UserError("no data"))}, "no data"),
    ],
)
def test_a_refusal_leaves_nothing_behind(
    add: AddEntry,
    shelf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, object],
    sentence: str,
) -> None:
    change = dict(change)
    if change.pop("too_large", False):
        monkeypatch.setattr(add_module, "MAX_SHIPPED", 1000)
    if change.get("weights") == "pickle":
        change["weights"] = _bare_pickle(tmp_path)
    with pytest.raises(UserError, match=sentence):
        add(**change)
    assert index.load_index() == ()
    assert not shelf.exists()


@pytest.mark.usefixtures("quick")
def test_a_late_refusal_leaves_the_file_and_the_index_as_they_were(
    add: AddEntry, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = add()
    file = shelf / first.file
    with pytest.raises(UserError, match="have one file name"):
        add(NAME.replace("tiny", "TINY"))
    assert [path.name for path in shelf.iterdir()] == [first.file]

    def full(*args: object) -> None:
        raise UserError("the disk is full")

    file.write_bytes(b"before")
    monkeypatch.setattr(index, "save_index", full)
    for name in (NAME, "qb_heat/second"):
        with pytest.raises(UserError, match="disk is full"):
            add(name, replace=True)
    assert [path.name for path in shelf.iterdir()] == [first.file]
    assert file.read_bytes() == b"before"
    assert index.load_index() == (first,)


@pytest.mark.usefixtures("quick")
def test_what_is_shipped_is_summed_over_the_files_that_are_there(
    add: AddEntry, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = add()
    monkeypatch.setattr(add_module, "MAX_SHIPPED", first.size + 1000)
    with pytest.raises(UserError, match="the weights in the package would be"):
        add("qb_heat/second")
    assert add(replace=True) == first  # it takes its own place
    (shelf / first.file).unlink()
    second: ZooEntry = add("qb_heat/second")
    assert [entry.name for entry in index.load_index()] == ["qb_heat/second", NAME]
    assert (shelf / second.file).is_file()

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs and checkpoints: found, labelled, loaded on first use, and left out where broken."""

import pickle
from pathlib import Path

import pytest
import torch

from qbheat_det.analysis.figure import choose_images, crop_squares, find_size, run_each
from qbheat_det.analysis.run import Run, open_runs
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import NotApplicable

from ..engine.tiny_detectors import make_probe_config, make_retinanet_config, save_run
from .tiny_runs import TinyRuns, make_images, truncate


def test_a_folder_gives_its_final_checkpoint_config_and_metrics(tmp_path: Path) -> None:
    weights = save_run(make_retinanet_config(), tmp_path / "mine", seed=3)
    lines = '{"iteration": 9, "lr": 0.1}\n7\n{"note": "\xff"}\n{"itera'
    (tmp_path / "mine" / "metrics.json").write_text(lines, encoding="latin-1")
    run = Run.open(tmp_path / "mine", device="cpu")
    assert (run.label, run.folder) == ("mine", tmp_path / "mine")
    assert (run.kind, str(run.weights)) == ("detector", weights)
    assert run.metrics == [{"iteration": 9, "lr": 0.1}]
    assert run.cfg.OUTPUT_DIR == str(tmp_path / "mine")
    stored = torch.load(weights, weights_only=True)["model"]
    torch.testing.assert_close(dict(run.model.state_dict()), stored, rtol=0, atol=0)
    assert run.model is run.model
    assert not run.model.training
    assert not any(parameter.requires_grad for parameter in run.model.parameters())
    run.require_kind("detector")
    with pytest.raises(NotApplicable, match="mine"):
        run.require_kind("classifier")


def test_a_run_in_progress_has_its_last_checkpoint_or_none(tmp_path: Path) -> None:
    weights = Path(save_run(make_probe_config(), tmp_path / "run"))
    weights.rename(tmp_path / "run" / "model_0000009.pth")
    (tmp_path / "run" / "last_checkpoint").write_text("model_0000009.pth")
    assert Run.open(tmp_path / "run").weights.name == "model_0000009.pth"
    (tmp_path / "run" / "model_0000009.pth").unlink()
    young = Run.open(tmp_path / "run", device="cpu")
    assert young.kind == "detector"
    with pytest.raises(NotApplicable, match="run"):
        _ = young.model


def test_other_paths_are_refused_and_no_pickle_is_executed(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "model.pkl").write_bytes(pickle.dumps({"model": Harmful()}))
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "model.pkl"):
        with pytest.raises(UserError, match=path.name):
            Run.open(path)
    save_run(make_probe_config(), tmp_path / "run")
    (tmp_path / "model.pkl").rename(tmp_path / "run" / "model_final.pth")
    with pytest.raises(UserError):
        _ = Run.open(tmp_path / "run", device="cpu").model
    assert not (tmp_path / "ran").exists()


def test_labels_are_short_unless_two_are_equal(tmp_path: Path) -> None:
    paths = []
    for name in ("a/seed1/pretraining", "b/seed1/pretraining", "c/other"):
        save_run(make_probe_config(), tmp_path / name)
        paths.append(str(tmp_path / name))
    runs = open_runs([*paths, f"Ours={paths[0]}"])
    labels = [run.label for run in runs]
    assert labels == [*paths[:2], "other", "Ours"]
    assert runs[3].folder == tmp_path / "a/seed1/pretraining"
    for twice in ([f"x={paths[0]}", f"x={paths[1]}"], [paths[2], paths[2]]):
        with pytest.raises(UserError, match="LABEL=PATH"):
            open_runs(twice)
    with pytest.raises(UserError, match="NO_SUCH"):
        open_runs(paths, opts=["NO_SUCH", "1"])


def test_broken_runs_are_left_out_with_their_label(
    tiny: TinyRuns, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.json").write_text("")
    new, whole = Run.open(tmp_path / "new"), tiny.get("untrained")
    cut = truncate(whole, tmp_path)

    def compute(run: Run) -> int:
        return sum(1 for _ in run.model.parameters())

    results = run_each([new, cut, whole], compute, nothing="nothing")
    assert list(results.found) == ["untrained"]
    assert [label in text for label, text in zip(("'new'", "'cut'"), results.left_out, strict=True)]
    assert len(results.draw("name", "Title", (), {}).explanation) == 1
    warnings = [r.getMessage() for r in caplog.records if "left out" in r.msg]
    assert warnings == [f"left out: {results.left_out[1]}"]  # a missing checkpoint is no error
    with pytest.raises(UserError, match=r"nothing: .*'new'.*'cut'"):
        run_each([new, cut], compute, nothing="nothing")
    with pytest.raises(NotApplicable, match=r"nothing: .*'new'"):
        run_each([new], compute, nothing="nothing")


def test_shared_images_are_spread_evenly_and_unreadable_ones_replaced(
    tiny: TinyRuns, tmp_path: Path
) -> None:
    run, folder = tiny.get("untrained"), make_images(tmp_path, 8)

    def choose(number: int) -> tuple[list[str], list[str]]:
        entries = choose_images([run], number, folder)
        return [Path(entry["file_name"]).name for entry in entries], entries.unreadable

    assert choose(4) == (["0.png", "2.png", "4.png", "6.png"], [])
    (folder / "2.png").write_text("not an image")
    assert choose(4) == (["0.png", "3.png", "4.png", "6.png"], [str(folder / "2.png")])
    assert len(choose(99)[0]) == 7
    (entry,) = crop_squares(run.cfg, [str(folder / "0.png")])
    assert entry["image"].shape == (3, 64, 64)
    retinanet = tiny.get("retinanet")
    (entry,) = crop_squares(retinanet.cfg, [str(folder / "0.png")], 32)
    assert entry["image"].shape == (3, 32, 32)
    assert find_size([retinanet, run], 1) == 64
    for path in folder.iterdir():
        path.write_bytes(b"not an image")
    with pytest.raises(UserError):
        choose(3)
    with pytest.raises(UserError, match="missing"):
        choose_images([run], 3, tmp_path / "missing")
    with pytest.raises(NotApplicable, match="--images"):
        choose_images([run], 3, None)

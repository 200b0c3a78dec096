# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probes of files and of random backbones, side by side, a function of the seed alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.config import CfgNode

from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.config import get_cfg, load_config
from qbheat_det.export import export_backbone
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from qbheat_det.probing.run import count_images_seen
from tests.engine.classifier_cases import make_classes
from tests.tool_modules import load_tool, refuse

main = load_tool("probe_backbone").main


def make_config(tmp_path: Path, backbone: str = "timm:resnet10t") -> str:
    """Writes a config of a small network of timm, at 32 pixels."""
    path = tmp_path / f"{backbone.replace(':', '_')}.yaml"
    path.write_text(
        f"MODEL: {{DEVICE: cpu, BACKBONE: {{NAME: '{backbone}', FREEZE_AT: 0}}}}\n"
        "INPUT: {PRETRAIN: {SIZE: 32}}\nDATALOADER: {NUM_WORKERS: 0}\nTEST: {KNN: {K: 3}}\n"
    )
    return str(path)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Flags that name two folders of three classes each, with a broken image."""
    train = make_classes(tmp_path / "train", dict.fromkeys("abc", 3))
    val = make_classes(tmp_path / "val", dict.fromkeys("abc", 3), first=100)
    (tmp_path / "train" / "b" / "x.png").write_text("no image")
    return ["--data", train, "--val", val]


def probe(words: list[str], tmp_path: Path) -> dict[str, Any]:
    main([*words, "--json", str(tmp_path / "out.json")])
    return dict(json.loads((tmp_path / "out.json").read_text()))


def write_weights(cfg: CfgNode, path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    backbone = build_bare_backbone(cfg)
    state = {f"backbone.{name}": value for name, value in backbone.state_dict().items()}
    save_weights(str(path), state, WeightsInfo())


def test_rows_are_files_and_random_backbones_without_and_with_new_statistics(
    folders: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_config(tmp_path)
    weights, bare = tmp_path / "w.safetensors", tmp_path / "bare.safetensors"
    write_weights(load_config(config), weights, seed=7)
    export_backbone(str(weights), bare)
    words = ["--config-file", config, "--weights", str(weights), str(bare), *folders]
    words += ["--random-seeds", "7", "8", "--recalibrate-bn", "4", "--probes", "knn"]
    found = probe(words, tmp_path)
    table = capsys.readouterr().out
    rows = found["rows"]
    names = [str(weights), str(bare), "random, seed 7", "random, seed 8"]
    assert [(row["backbone"], row["recalibrated"], row["probe"]) for row in rows] == [
        (name, number, "knn") for name in names for number in (0, 4)
    ]
    # What a file holds is scored as what it was written from.
    own = ("backbone", "images_seen", "seconds")
    scores = [{k: v for k, v in row.items() if k not in own} for row in rows]
    assert scores[0:2] == scores[2:4] == scores[4:6]
    assert scores[4:6] != scores[6:8]
    assert [row["images_seen"] for row in rows[::2]] == [None, None, 0, 0]
    assert {row["num_images"] for row in rows} == {9}
    setting = found["setting"]
    assert (setting["feature"], setting["knn"]["k"], found["skipped_images"]) == ("s16", 3, 1)
    assert "Left out, 1 in all" in caplog.text
    assert "x.png" in caplog.text
    assert f"| {names[2]} " in table
    assert "as stored" in table
    # What stands in the file is not worked out again, and told again.
    assert probe(words, tmp_path) == found
    assert capsys.readouterr().out == table


def test_a_repeated_command_goes_on_with_what_is_missing_and_draws_all(
    folders: list[str], tmp_path: Path
) -> None:
    words = ["--config-file", make_config(tmp_path), "--random", *folders]
    first = probe([*words, "--probes", "knn"], tmp_path)
    picture = tmp_path / "probes.svg"
    wide = [*words, "--probes", "knn", "tran-1:192", "tran-1:64"]
    both = probe([*wide, "--plot", str(picture)], tmp_path)
    assert both["rows"][0] == first["rows"][0]
    # 192 is MODEL.CLASSIFIER.WIDTH, so that its row is that of a command without widths.
    assert [row["probe"] for row in both["rows"][1:]] == ["tran-1", "tran-1:64"]
    assert all(row["chosen"]["epochs"] >= 1 for row in both["rows"][1:])
    assert "<!-- tran-1, width" in picture.read_text()


def test_results_of_other_settings_are_refused_and_of_other_weights_replaced(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, weights = make_config(tmp_path), tmp_path / "w.safetensors"
    words = ["--config-file", config, "--weights", str(weights), "--probes", "knn", *folders]
    digests = set()
    for seed in (1, 2):
        write_weights(load_config(config), weights, seed=seed)
        (row,) = probe(words, tmp_path)["rows"]
        digests.add(row["digest"])
    assert len(digests) == 2
    words += ["--json", str(tmp_path / "out.json")]
    assert "(pixels)" in refuse(main, [*words, "MODEL.PIXEL_STD", "[2.0, 2.0, 2.0]"], capsys)
    image = next(Path(folders[1]).rglob("*.jpg"))
    image.rename(image.with_name("another.jpg"))
    assert "(contents)" in refuse(main, words, capsys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--weights", "w.safetensors"], "--config-file"),
        ([], "--weights FILE"),
        (["--random", "--feature", "s4"], "s4"),
        (["--random", "--recalibrate-bn", "-1"], "--recalibrate-bn"),
        (["--random", "TEST.KNN.K", "0"], "TEST.KNN.K"),
        (["--random", "--probes", "lin"], "'lin'"),
        (["--random", "--probes", "tran-1:96"], "tran-1:96"),
        (["--random", "--plot", "a.pdf"], "--plot"),
        (["--random", "--probes", "tran-1", "--memory-gb", "1e-6"], "--memory-gb"),
        (["--random", "--val", "other"], "other'"),
        (["--random", "--data", "broken"], "--data"),
        *((["--random", "--json", f"{name}.json"], name) for name in ("text", "rows")),
    ],
)
def test_bad_arguments_are_named(
    words: list[str], expected: str, folders: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if "w.safetensors" in words:
        other = load_config(make_config(tmp_path, "timm:resnet14t"))
        write_weights(other, tmp_path / "w.safetensors", seed=0)
    make_classes(tmp_path / "other", {"d": 1})
    for name in "abc":
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "0.png").write_text("no image")
    contents = {"text.json": "no json", "rows.json": '{"setting": {}, "rows": [3]}'}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    made = ("w.safetensors", "other", "broken", *contents)
    given = [str(tmp_path / word) if word in made else word for word in words]
    said = refuse(main, ["--config-file", make_config(tmp_path), *folders, *given], capsys)
    assert re.search(expected, said)
    assert all((tmp_path / name).read_text() == text for name, text in contents.items())


def test_images_seen_are_those_of_all_steps_that_went_into_the_weights() -> None:
    cfg = get_cfg()
    cfg.SOLVER.IMS_PER_BATCH = 64
    info = WeightsInfo.from_config(cfg, iteration=186, commit="")
    assert count_images_seen(info) == 187 * 64
    for unknown in (None, WeightsInfo(), WeightsInfo(config="NO_KEY: 1")):
        assert count_images_seen(unknown) is None

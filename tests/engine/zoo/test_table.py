# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MODEL_ZOO.md: made from the index, and nothing of ours where nothing was measured."""

import re
from pathlib import Path

import pytest

import qbheat_det.model_zoo.index as index_module
from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import Metric, index
from qbheat_det.model_zoo.paper_targets import TARGETS
from qbheat_det.model_zoo.table import format_briefly, format_figure, render_zoo, write_zoo
from tests.model_zoo.zoo_cases import make_entry
from tests.tool_modules import load_tool

ROOT = Path(__file__).resolve().parents[3]
REAL_INDEX = Path(index_module.__file__).with_name("index.json")
PROBE = "coco/retinanet_285M_probe.yaml"


def test_the_file_of_the_repository_is_what_the_index_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # the package's own shelf
    text = (ROOT / "MODEL_ZOO.md").read_text(encoding="utf-8")
    assert text == render_zoo(index.load_index(REAL_INDEX)), "run: python tools/zoo.py table"


def test_every_config_that_is_named_exists() -> None:
    text = (ROOT / "MODEL_ZOO.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(configs/([^)]+)\)", text)
    assert len(links) >= sum(len(target.rows) for target in TARGETS)
    for link in links:
        get_config_path(link)
    with pytest.raises(UserError, match=r"no config named 'none\.yaml'"):
        render_zoo([make_entry(config="none.yaml")])


def _row(text: str, config: str) -> list[str]:
    """The cells of a target's line, without the first."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| [{config}]"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_papers_figures_stay_targets_until_the_same_was_measured() -> None:
    paper = ["30.8", "31.3", "33.8"]
    toy = make_entry(config=PROBE)
    assert _row(render_zoo([toy]), "retinanet_285M_probe") == [*paper, "—"]
    coco = Metric("AP", 31.04, "", "COCO val2017", note="one seed")
    other_recipe = make_entry(config="coco/retinanet_285M_finetune.yaml", figures=(coco,))
    assert _row(render_zoo([other_recipe]), "retinanet_285M_probe") == [*paper, "—"]
    ours = make_entry(config=PROBE, figures=(coco,))
    assert _row(render_zoo([ours]), "retinanet_285M_probe") == [
        *paper,
        "31.04 ([retinanet/tiny](#retinanettiny))",
    ]


def test_every_number_of_the_paper_is_printed_and_none_is_doubled() -> None:
    text = render_zoo([])
    for target in TARGETS:
        assert f"## {target.title}" in text
        assert len({config for _, config, _ in target.rows}) == len(target.rows)
        for before, config, numbers in target.rows:
            link = f"| {before}[{config.rpartition('/')[2]}](configs/{config}.yaml) | "
            assert link + " | ".join(number or "—" for number in numbers) + " | — |" in text
            assert len(numbers) == len(target.columns)


def test_an_entry_tells_all_that_the_index_knows_of_it() -> None:
    entry = make_entry()
    text = render_zoo([entry])
    for word in (
        *(entry.summary, entry.file, entry.sha256, entry.data, entry.data_licence, entry.licence),
        *(entry.command, entry.commit, entry.date, f"(configs/{entry.config})"),
        "| AP 12.5 % |",
        "- AP 12.5 % on toy val (by chance)",
        "qbheat://NAME",
    ):
        assert word in text
    assert "No weights are published yet" not in text
    assert "No weights are published yet" in render_zoo([])


def test_figures_are_written_briefly_and_with_all_that_is_known() -> None:
    spread = "±0.4, the standard error"
    figure = Metric("kNN top-1", 61.25, "%", "Caltech-101 val", spread, "3 seeds")
    assert format_briefly(figure) == "kNN top-1 61.2 ± 0.4 %"
    assert format_figure(figure) == (
        "kNN top-1 61.25 ± 0.4 % on Caltech-101 val (±: the standard error; 3 seeds)"
    )
    by_hand = Metric("loss", 0.8094, "", "toy", "0.1 to 0.9")
    assert format_briefly(by_hand) == "loss 0.8094"
    assert format_figure(by_hand) == "loss 0.8094 on toy (spread: 0.1 to 0.9)"
    assert format_figure(Metric("AP", 2.0, "", "toy", "±1")) == "AP 2 ± 1 on toy"


def test_no_command_ends_its_block() -> None:
    text = render_zoo([make_entry(command="echo '```'\n````\nrm x")])
    assert "\n`````sh\necho '```'\n````\nrm x\n`````\n" in text


def test_the_tool_writes_it_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index.save_index([make_entry()])
    target = tmp_path / "ZOO.md"
    assert load_tool("zoo").main(["table", "--output", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert target.read_text(encoding="utf-8") == render_zoo([make_entry()])
    assert write_zoo(target) == target

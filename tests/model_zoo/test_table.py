# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``MODEL_ZOO.md`` follows from the index; the paper's results stay targets until measured."""

import re
from pathlib import Path

import pytest

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import Metric, index, sources
from qbheat_det.model_zoo.paper_targets import TARGETS
from qbheat_det.model_zoo.table import format_briefly, format_metric, render_zoo, write_zoo

from .conftest import MakeEntry, make_entry

ROOT = Path(__file__).resolve().parents[2]
PROBE = "coco/retinanet_285M_probe.yaml"


def test_the_file_of_the_repository_is_rendered_from_the_package_s_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = Path(index.__file__).parent
    monkeypatch.setattr(sources, "SHIPPED", package / "weights")
    text = (ROOT / "MODEL_ZOO.md").read_text(encoding="utf-8")
    expected = render_zoo(index.load_index(package / "index.json"))
    assert text == expected, "run: python tools/zoo.py table"
    for link in re.findall(r"\]\(configs/([^)]+)\)", text):
        get_config_path(link)


def _find_row(text: str, config: str) -> list[str]:
    """The cells of a target's line, without the first."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| [{config}]"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_only_the_same_config_and_data_count_as_ours() -> None:
    coco = Metric("AP", 31.04, "", "COCO val2017", note="one seed")
    others = [
        make_entry(config=PROBE),
        make_entry("retinanet/b", config="coco/retinanet_285M_finetune.yaml", metrics=(coco,)),
    ]
    paper = ["30.8", "31.3", "33.8"]
    assert _find_row(render_zoo(others), "retinanet_285M_probe") == [*paper, "—"]
    ours = make_entry(config=PROBE, metrics=(coco,))
    link = "31.04 ([retinanet/tiny](#retinanettiny))"
    assert _find_row(render_zoo([ours]), "retinanet_285M_probe") == [*paper, link]
    with pytest.raises(UserError, match=r"none\.yaml"):
        render_zoo([make_entry(config="none.yaml")])


def test_every_number_of_the_paper_is_printed_once() -> None:
    text = render_zoo([])
    for target in TARGETS:
        assert f"## {target.title}" in text
        assert len({config for _, config, _ in target.rows}) == len(target.rows)
        for prefix, config, numbers in target.rows:
            link = f"| {prefix}[{config.rpartition('/')[2]}](configs/{config}.yaml) | "
            assert link + " | ".join(number or "—" for number in numbers) + " | — |" in text
            assert len(numbers) == len(target.columns)


def test_all_fields_of_an_entry_are_printed(ship: MakeEntry, tmp_path: Path) -> None:
    # A command must not close its code block.
    entry = ship(command="echo '```'\n````\nrm x")
    text = write_zoo(tmp_path / "ZOO.md").read_text(encoding="utf-8")
    for word in (
        *(entry.summary, entry.file, entry.sha256, entry.data, entry.data_licence, entry.licence),
        *(entry.commit, entry.date, f"(configs/{entry.config})", "MB, shipped |"),
        *("| AP 12.5 % |", "- AP 12.5 % on toy val (by chance)"),
        f"\n`````sh\n{entry.command}\n`````\n",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("metric", "brief", "full"),
    [
        (
            Metric("kNN top-1", 61.25, "%", "val", "±0.4, the standard error", "3 seeds"),
            "kNN top-1 61.2 ± 0.4 %",
            "kNN top-1 61.25 ± 0.4 % on val (±: the standard error; 3 seeds)",
        ),
        (
            Metric("loss", 0.8094, "", "toy", "0.1 to 0.9"),
            "loss 0.8094",
            "loss 0.8094 on toy (spread: 0.1 to 0.9)",
        ),
        (Metric("AP", 2.0, "", "toy", "±1"), "AP 2 ± 1", "AP 2 ± 1 on toy"),
    ],
)
def test_metrics_are_written_in_brief_and_in_full(metric: Metric, brief: str, full: str) -> None:
    assert (format_briefly(metric), format_metric(metric)) == (brief, full)

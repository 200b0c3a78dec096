# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of cached features: what is compared, by what bound, and that both do the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.modeling import build_model

from benchmarks import cached_training
from benchmarks.cached_cases import CASES, Bound, make_config, shrunk
from benchmarks.cached_training import (
    Figures,
    Turns,
    measure_case,
    rows_of,
    time_turns,
)
from qbheat_det.analysis.complexity import CountingRule, count_madds
from qbheat_det.data import build_mapper

CASE = CASES["3.7g_211"]  # two images a step
FIGURES = Figures(
    case=CASE,
    bound=Bound(encoder=77_500_000_000, head=15_700_000_000),
    online=Turns(step=[8.0, 10.0, 9.0], waiting=[1.0, 2.0, 1.0], losses=[5.0]),
    cached=Turns(step=[2.0, 4.0, 2.0], waiting=[0.5, 0.5, 0.5], losses=[5.0]),
)


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_trainers_take_turns_and_each_goes_first_as_often() -> None:
    now, order = [0.0], []

    def call(name: str, seconds: float) -> tuple[float, float]:
        order.append(name)
        now[0] += seconds
        return seconds / 4, float(len(order))

    turns = time_turns(
        {"online": lambda: call("online", 8.0), "cached": lambda: call("cached", 2.0)},
        rounds=2,
        steps=2,
        clock=lambda: now[0],
    )
    pairs = [order[i] for i in range(0, len(order), 2)]
    assert pairs == ["cached", "online", "online", "cached", "cached", "online"]
    assert (turns["online"].step, turns["cached"].step) == ([8.0, 8.0], [2.0, 2.0])
    assert (turns["online"].waiting, turns["cached"].waiting) == ([2.0, 2.0], [0.5, 0.5])
    assert turns["cached"].losses == [1.0, 2.0, 7.0, 8.0, 9.0, 10.0]


def test_a_ratio_is_taken_in_every_round_with_all_of_a_step_and_without_waiting_for_images() -> (
    None
):
    whole, computing = rows_of("3.7g_211", FIGURES)
    assert whole.name == "cached_training/3.7g_211_vs_online"
    assert (whole.ours, whole.peer, whole.unit) == (1.0, 2 / 9, "img/s")
    assert (whole.ratio_least, whole.ratio, whole.ratio_greatest) == (2.5, 4.0, 4.5)
    assert computing.name == "cached_training/3.7g_211_vs_online_without_loading"
    assert (computing.ratio_least, computing.ratio, computing.ratio_greatest) == (2.0, 3.5, 4.0)


def test_of_a_pyramid_the_part_below_it_is_the_frozen_encoder_and_all_else_the_head(
    tmp_path: Path,
) -> None:
    case = shrunk(CASES["285m_retinanet"])
    model = build_model(make_config(case, tmp_path, num_images=1))
    encoder = model.backbone.bottom_up
    inside = {id(parameter) for parameter in encoder.parameters()}
    assert all(p.requires_grad != (id(p) in inside) for p in model.parameters())
    bound = Bound.of(model, (64, 64))
    alone = count_madds(encoder, torch.zeros(1, 3, 64, 64)).total(CountingRule.CORE)
    assert bound.encoder == alone
    assert bound.head > 0


@pytest.mark.parametrize("name", CASES)
def test_a_case_shows_images_of_its_size_once_augmented(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    cfg = make_config(case, tmp_path, num_images=1)
    (record,) = DatasetCatalog.get(cfg.DATASETS.TRAIN[0])
    entry = build_mapper(cfg, is_train=True)(record)
    assert tuple(entry["image"].shape) == (3, *case.size)
    assert ("instances" in entry) == case.has_boxes
    assert cfg.MODEL.BACKBONE.FREEZE_AT == 5


@pytest.fixture(scope="module")
def measured() -> dict[str, Figures]:
    """Figures of the cases of a quick run by their titles, from caches of full precision."""
    cases = [shrunk(CASES[name]) for name in cached_training.QUICK]
    return {case.title: measure_case(case, rounds=1, dtype="float32") for case in cases}


@pytest.mark.slow
def test_both_train_the_same_steps(measured: dict[str, Figures]) -> None:
    detector = measured[CASES["285m_211"].title]
    online, cached = detector.online.losses, detector.cached.losses
    # The cache was made in another batch, whose convolutions round otherwise.
    torch.testing.assert_close(cached, online, rtol=1e-5, atol=0.0)
    assert len(set(online)) == len(online) == 2


@pytest.mark.slow
def test_a_quick_run_measures_a_detector_and_a_classifier(
    measured: dict[str, Figures],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cached_training, "measure_case", lambda case, **_: measured[case.title])
    names = {row.name for row in cached_training.run(quick=True, threads=1)}
    assert names == {
        f"cached_training/{case}_vs_{peer}"
        for case in ("285m_211", "285m_linear")
        for peer in ("online", "online_without_loading")
    }
    assert "MF-285M + MF-Dec-211" in capsys.readouterr().out

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of a GPU: which pairs, and what is fed; it is run where there is one."""

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import compare, run
from benchmarks.timing import set_threads


def test_without_a_gpu_it_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(quick=True, threads=torch.get_num_threads()) == []
    assert "PyTorch sees no CUDA GPU here" in capsys.readouterr().out


def test_each_form_of_ours_stands_beside_each_of_a_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(name: str, form: str, **settings: object) -> object:
        built.append((name, form, settings["dtype"]))
        return lambda images: images

    monkeypatch.setattr(gpu, "build", build)
    monkeypatch.setattr(
        gpu, "seconds_in_rounds", lambda calls, **_: {name: [0.5, 0.25] for name in calls}
    )
    rows = compare(torch.zeros(2, 3, 8, 8), ("detr_r50",), quick=True)
    assert len(rows) == 2 * 2 * 2
    assert rows[-1].name == "gpu/3.7g_522_deploy_b2_vs_detr_r50_compiled"
    assert (rows[0].ours, rows[0].unit) == (6.0, "img/s")
    rows = compare(torch.zeros(2, 3, 8, 8), ("rt_detr_r18", "rt_detr_r50"), quick=True)
    assert rows[0].name == "gpu/285m_211_640_eager_b2_vs_rt_detr_r18_eager"
    assert len(rows) == 2 * 4
    peers = {dtype for name, _, dtype in built if "detr_r" in name}
    assert peers == {torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_quick_run_measures_on_a_gpu() -> None:
    threads = torch.get_num_threads()
    names = {row.name for row in run(quick=True, threads=threads)}
    set_threads(threads)
    assert "gpu/285m_211_deploy_b1_vs_detr_r50_eager" in names
    assert "gpu/qb_heat_285m_channels_last_from_memory_vs_on_gpu" in names

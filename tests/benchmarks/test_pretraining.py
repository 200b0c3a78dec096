# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of a pre-training step: what is counted; and that those of a GPU run on one."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks import gpu, pretraining
from benchmarks.pretraining_contenders import CONTENDERS, SETTINGS, build
from benchmarks.pretraining_figures import count
from qbheat_det.analysis.complexity import CountingRule, count_madds

OURS, MASKED = "285m", "285m_masked_convolution"


@pytest.fixture(autouse=True)
def _keep_torch_as_it_was() -> Iterator[None]:
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.slow
def test_multiply_adds_are_those_of_the_parts() -> None:
    setting = SETTINGS["128"]
    model = build(CONTENDERS[OURS], setting)
    encoder, whole = count(OURS, setting)
    assert encoder == count_madds(model.backbone, torch.zeros(1, 3, 64, 64)).total(
        CountingRule.CORE
    )
    decoder = count_madds(model.decoder, torch.zeros(1, 8, 8, 256)).total(CountingRule.CORE)
    projection = 16 * 720 * 256
    predictor = 3 * 16 * 256 * 256
    assert whole == encoder + projection + predictor + decoder
    masked, _ = count(MASKED, setting)
    assert masked == count_madds(model.backbone, torch.zeros(1, 3, 128, 128)).total(
        CountingRule.CORE
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_quick_run_measures_on_a_gpu() -> None:
    rows = {row.name: row for row in pretraining.run(quick=True)}
    assert rows["pretraining/128/285m_memory_vs_masked_convolution"].ours > 0
    assert 0 < rows["pretraining/128/285m_step_vs_matmul"].ratio < 1
    names = {row.name for row in gpu.run(quick=True, threads=torch.get_num_threads())}
    assert "gpu/285m_211_deploy_b1_vs_detr_r50_eager" in names
    assert "gpu/qb_heat_285m_channels_last_from_memory_vs_on_gpu" in names

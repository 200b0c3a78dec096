# Copyright (c) qbheat_det contributors. Apache-2.0.
"""benchmarks/scaling.py against arithmetic."""

import math

import pytest

from benchmarks.scaling import Cluster, Job, simulate


def test_without_faults_a_job_takes_what_arithmetic_says() -> None:
    found = simulate(Job("", 64_000, 64), Cluster(4, 100.0, price=2.0))
    assert found.hours * 3600 == pytest.approx(64_000 / 400)
    assert found.cost == pytest.approx(64_000 / 400 / 3600 * 4 * 2)
    assert found.seconds["compute"] == pytest.approx(64_000 / 400)
    gradients = simulate(
        Job("", 64_000, 64, gradient_bytes=1e6), Cluster(4, 100, exchange_rate=1e7)
    )
    assert gradients.seconds["gradients"] == pytest.approx(1000 * 2 * 3 / 4 * 0.1)


@pytest.mark.parametrize(("is_training", "nodes_per_image"), [(True, 1), (False, 4)])
def test_a_slow_network_bounds_training_by_all_bytes_and_prediction_by_a_nodes_share(
    is_training: bool, nodes_per_image: int
) -> None:
    job = Job("", 16_000, 64, image_bytes=1e5, is_training=is_training)
    cluster = Cluster(4, 1e6, download_rate=1e6, shard_bytes=1e5)
    assert simulate(job, cluster).hours * 3600 == pytest.approx(1600 / nodes_per_image, rel=0.02)
    decoding = simulate(job, Cluster(4, 1e6, decode_rate=10.0))
    assert decoding.hours * 3600 == pytest.approx(16_000 / 40, rel=0.01)


def test_failures_cost_what_the_expectation_of_a_poisson_process_says() -> None:
    """Of one node: (1 / rate + restart) (e^(rate (interval + checkpoint)) - 1) an interval."""
    rate, interval, checkpoint, restart = 1 / 500, 100, 5.0, 30.0
    job = Job("", 20_000, 1, checkpoint_seconds=checkpoint, checkpoint_steps=interval)
    cluster = Cluster(1, 1.0, failures=3600 * rate, restart_seconds=restart)
    runs = [simulate(job, cluster, seed) for seed in range(16)]
    mean = sum(run.hours * 3600 for run in runs) / len(runs)
    expected = 200 * (1 / rate + restart) * math.expm1(rate * (interval + checkpoint))
    assert mean == pytest.approx(expected, rel=0.03)
    assert sum(run.failures for run in runs) / len(runs) == pytest.approx(
        200 * math.expm1(rate * (interval + checkpoint)), rel=0.1
    )


def test_stragglers_cost_the_largest_of_the_nodes_and_nothing_in_prediction() -> None:
    job, cluster = Job("", 256_000, 64), Cluster(2, 100.0, jitter=0.1)
    found = simulate(job, cluster)
    # The larger of two normal numbers is 1 / sqrt(pi) deviations above their mean.
    assert found.seconds["stragglers"] / found.seconds["compute"] == pytest.approx(
        0.1 / math.sqrt(math.pi), rel=0.1
    )
    alone = simulate(Job("", 256_000, 64, is_training=False), cluster)
    assert alone.seconds["stragglers"] == pytest.approx(0.0, abs=1e-9)

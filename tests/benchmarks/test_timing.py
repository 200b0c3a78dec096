# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The measuring code: order of calls, and statistics."""

from benchmarks.timing import Sample, samples_in_rounds


class Clock:
    """A clock that stands still until a call moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_calls_take_turns_and_warm_up_is_not_timed() -> None:
    clock, order = Clock(), []

    def call(name: str, seconds: list[float]) -> None:
        order.append(name)
        clock.now += seconds.pop(0)

    ours, peer = [100.0, 1.0, 3.0, 2.0], [200.0, 5.0, 4.0, 9.0]
    samples = samples_in_rounds(
        {"ours": lambda: call("ours", ours), "peer": lambda: call("peer", peer)},
        rounds=3,
        warm_up=1,
        clock=clock,
    )
    assert order == ["ours", "peer"] * 4
    assert samples == {"ours": Sample(2.0, 1.0, 3.0), "peer": Sample(5.0, 4.0, 9.0)}

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What large jobs take on many machines: a simulation of data, stragglers, failures, checkpoints.

python benchmarks/scaling.py [--prices CPU_NODE GPU_NODE] [--seed N]

prints the tables of docs/distributed.md. Rates of one node go in; hours, money and what they were
spent on come out.
"""

import argparse
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

CAUSES = ("compute", "stragglers", "data", "gradients", "checkpoints", "repeated", "restarts")
_WINDOW = 10_000  # steps that are simulated one by one; longer jobs have steps like these


@dataclass(frozen=True)
class Job:
    """Work of equal steps.

    Attributes:
        images: in all, over all epochs.
        batch: images of a step, over all nodes.
        gradient_bytes: that every node exchanges after each step; 0 for prediction.
        image_bytes: of one compressed image.
        checkpoint_seconds: that a step waits for one checkpoint.
        checkpoint_steps: from one to the next; 0 takes Young's interval, which loses least.
        downloaded: share of the images seen that cross the network: 1 over the epochs where the
            cache of a node holds them all.
        is_training: whether nodes wait for each other after each step, and read the same shards:
            the order of images does not depend on the number of nodes, so that each one meets
            every shard. In prediction each node has shards of its own.
    """

    name: str
    images: float
    batch: int
    gradient_bytes: float = 0.0
    image_bytes: float = 110e3
    checkpoint_seconds: float = 0.0
    checkpoint_steps: int = 0
    downloaded: float = 1.0
    is_training: bool = True


@dataclass(frozen=True)
class Cluster:
    """Equal nodes.

    Attributes:
        nodes: their number while none is broken.
        compute_rate: images a second that the model of one node takes.
        decode_rate: images a second that its loading processes make of JPEGs.
        download_rate: bytes a second from the store to one node.
        exchange_rate: bytes a second between two nodes.
        jitter: standard deviation of the logarithm of a node's step.
        slow_share, slow_factor: share of a node's steps that take this many times as long.
        stall_share, stall_seconds: share of shards that come so much later.
        failures: of one node in an hour.
        restart_seconds: from a failure, or a node that joins, to the next step of the others.
        repair_seconds: until a failed node joins again.
        shard_bytes, shards_ahead, batches_ahead: what a node keeps of its data.
        price: of a node for an hour.
    """

    nodes: int
    compute_rate: float
    decode_rate: float = math.inf
    download_rate: float = math.inf
    exchange_rate: float = math.inf
    jitter: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0
    shard_bytes: float = 64e6
    shards_ahead: int = 2
    batches_ahead: int = 2
    stall_share: float = 0.0
    stall_seconds: float = 0.0
    failures: float = 0.0
    restart_seconds: float = 0.0
    repair_seconds: float = 0.0
    price: float = 0.0


@dataclass
class Outcome:
    """What a job took: hours, money, failures, and seconds by cause."""

    hours: float = 0.0
    cost: float = 0.0
    failures: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))


def simulate_steps(
    job: Job, cluster: Cluster, nodes: int, rng: np.random.Generator, steps: int = _WINDOW
) -> dict[str, float]:
    """Returns the mean seconds of a step by cause, simulated step by step.

    Every node downloads shards one after another, at most ``shards_ahead`` of the one in use, and
    decodes batches, at most ``batches_ahead``; a step ends when the slowest node has ended it and
    the gradients are exchanged. The first half fills the buffers and is not counted.
    """
    share = job.batch / nodes
    read = (job.batch if job.is_training else share) * job.image_bytes * job.downloaded
    decode = share / cluster.decode_rate
    # A ring of n nodes sends every byte 2 (n - 1) / n times.
    exchange = 2 * (nodes - 1) / nodes * job.gradient_bytes / cluster.exchange_rate
    arrived, decoded, now = np.zeros(nodes), np.zeros(nodes), np.zeros(nodes)
    taken = deque([now], maxlen=cluster.shards_ahead)  # when shards came into use
    started = deque([now], maxlen=cluster.batches_ahead)  # when the last steps began
    sums, shard, counted = dict.fromkeys(CAUSES[:4], 0.0), -1, steps - steps // 2
    for step in range(steps):
        while shard < int((step + 1) * read / cluster.shard_bytes):
            late = cluster.stall_seconds * (rng.random(nodes) < cluster.stall_share)
            seconds = cluster.shard_bytes / cluster.download_rate + late
            arrived = np.maximum(arrived, taken[0]) + seconds
            shard += 1
            taken.append(now)
        decoded = np.maximum(np.maximum(decoded, arrived), started[0]) + decode
        begin = np.maximum(now, decoded)
        compute = share / cluster.compute_rate * np.exp(cluster.jitter * rng.standard_normal(nodes))
        compute *= np.where(rng.random(nodes) < cluster.slow_share, cluster.slow_factor, 1.0)
        started.append(begin)
        end, slowest = begin + compute, compute
        if job.is_training:
            end, slowest = np.full(nodes, end.max()), compute.max()
        if step >= steps // 2:
            waited = np.mean(end - now - slowest)
            parts = (compute.mean(), np.mean(slowest - compute), waited, exchange)
            for cause, value in zip(sums, parts, strict=True):
                sums[cause] += float(value) / counted
        now = end + exchange
    return sums


def simulate(
    job: Job, cluster: Cluster, seed: int = 0, failures_at: Sequence[float] | None = None
) -> Outcome:
    """Returns what a job takes, failures, repairs and checkpoints included.

    When a node fails, and when one joins again, all go back to the last checkpoint and go on with
    the nodes there are; without any they wait for one. One that takes no time to repair is
    replaced at once, by a single restart. ``failures_at``, seconds from the first step, replaces
    failures drawn at random.
    """
    rng = np.random.default_rng(seed)
    outcome = Outcome()
    shares: dict[int, dict[str, float]] = {}
    interval, total = _choose_interval(job, cluster, rng), math.ceil(job.images / job.batch)
    clock, done, nodes = 0.0, 0, cluster.nodes
    repairs: deque[float] = deque()

    def spend(cause: str, seconds: float) -> None:
        nonlocal clock
        clock += seconds
        outcome.seconds[cause] += seconds
        outcome.cost += seconds / 3600 * nodes * cluster.price

    while done < total:
        if not nodes:
            nodes = 1
            spend("restarts", max(0.0, repairs.popleft() - clock) + cluster.restart_seconds)
        if nodes not in shares:
            shares[nodes] = simulate_steps(job, cluster, nodes, rng)
        step = sum(shares[nodes].values())
        failure = math.inf
        if failures_at is not None and outcome.failures < len(failures_at):
            failure = failures_at[outcome.failures] - clock
        elif failures_at is None and cluster.failures:
            failure = rng.exponential(3600 / (nodes * cluster.failures))
        joining = repairs[0] - clock if repairs else math.inf
        until = max(0.0, min(failure, joining))
        # Checkpoints are at multiples of the interval, which is where every start begins.
        period = interval * step + job.checkpoint_seconds
        left = (total - done) * step + (total - done) // interval * job.checkpoint_seconds
        written = (total - done) // interval if until >= left else int(until // period)
        kept = total - done if until >= left else written * interval
        for cause, seconds in shares[nodes].items():
            spend(cause, kept * seconds)
        spend("checkpoints", written * job.checkpoint_seconds)
        done += kept
        if until < left:
            spend("repeated", until - written * period)
            if failure <= joining:
                outcome.failures += 1
                if cluster.repair_seconds:
                    nodes -= 1
                    repairs.append(clock + cluster.repair_seconds)
            else:
                repairs.popleft()
                nodes += 1
            spend("restarts", cluster.restart_seconds if nodes else 0.0)
    outcome.hours = clock / 3600
    return outcome


def _choose_interval(job: Job, cluster: Cluster, rng: np.random.Generator) -> int:
    """Returns the steps between checkpoints: those of the job, or the root of 2 c M (Young 1974).

    c are the seconds of a checkpoint, M those between failures.
    """
    if job.checkpoint_steps or not cluster.failures:
        return job.checkpoint_steps or math.ceil(job.images / job.batch)
    step = sum(simulate_steps(job, cluster, cluster.nodes, rng).values())
    seconds = math.sqrt(2 * job.checkpoint_seconds * 3600 / (cluster.failures * cluster.nodes))
    return max(1, round(seconds / step))


# Rates of one node, from docs/performance.md, docs/shards.md and docs/reproduce.md. Of 16 cores:
# measured on two, times eight. Of 8 GPUs: arithmetic, 15 tera-multiply-adds a second each.
_FAULTS = {
    "jitter": 0.05, "slow_share": 1e-3, "slow_factor": 5.0, "stall_share": 1e-4,
    "stall_seconds": 30.0, "failures": 1e-3, "restart_seconds": 60.0, "repair_seconds": 1800.0,
}  # fmt: skip
_NODES = {"16 cores": (16, 1.25e9, 1.25e9), "8 GPUs": (64, 1.25e9, 12.5e9)}  # cores, bytes a second
_DECODED = 449.0  # images of 640 x 480 a second and core
_PRETRAINING = {"batch": 1024, "gradient_bytes": 115e6, "checkpoint_seconds": 8.8}
# Jobs, with what a node of each kind takes a second, and images beside those of 640 x 480.
_JOBS = (
    (Job("QB-Heat, 285M at 256 pixels: ImageNet, 400 epochs", 1.281e6 * 400, downloaded=1 / 400,
         **_PRETRAINING), {"16 cores": 42.0, "8 GPUs": 7300.0}, 1.0),
    (Job("QB-Heat, 285M at 256 pixels: 100 million images, once", 1e8, **_PRETRAINING),
     {"16 cores": 42.0, "8 GPUs": 7300.0}, 1.0),
    (Job("MF-DETR, 285M + 211 at 800 x 1333: a billion images", 1e9, 64, checkpoint_seconds=0.1,
         checkpoint_steps=160, is_training=False), {"16 cores": 27.5, "8 GPUs": 6700.0}, 3.5),
)  # fmt: skip


def build_cluster(kind: str, nodes: int, rate: float, pixels: float, price: float) -> Cluster:
    """Returns nodes of a kind; ``pixels`` are those of an image over those of 640 x 480."""
    cores, download, exchange = _NODES[kind]
    return Cluster(
        nodes, rate, decode_rate=cores * _DECODED / pixels, download_rate=download,
        exchange_rate=exchange, price=price, **_FAULTS,
    )  # fmt: skip


def format_rows(prices: Mapping[str, float], seed: int) -> list[str]:
    """Returns the table of docs/distributed.md: jobs on 1, 8 and 64 nodes of each kind."""
    rows = [
        "| job | nodes | hours | cost | computing | else |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for job, rates, pixels in _JOBS:
        for (kind, rate), nodes in itertools.product(rates.items(), (1, 8, 64)):
            batch = job.batch * (1 if job.is_training else nodes)
            cluster = build_cluster(kind, nodes, rate, pixels, prices[kind])
            found = simulate(dataclasses.replace(job, batch=batch), cluster, seed)
            total = sum(found.seconds.values())
            shares = {cause: seconds / total for cause, seconds in found.seconds.items()}
            computing = shares.pop("compute")
            largest = sorted(shares.items(), key=lambda pair: -pair[1])[:2]
            other = ", ".join(f"{cause} {share:.0%}" for cause, share in largest if share >= 0.005)
            rows.append(
                f"| {job.name} | {nodes} x {kind} | {_format(found.hours)} | "
                f"{_format(found.cost)} | {computing:.0%} | {other} |"
            )
    return rows


def _format(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prices",
        type=float,
        nargs=len(_NODES),
        default=(0.6, 20.0),
        help=f"of an hour of a node, of {' and of '.join(_NODES)} (default: 0.6 20)",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print("\n".join(format_rows(dict(zip(_NODES, args.prices, strict=True)), args.seed)))


if __name__ == "__main__":
    main()

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The critic: its slope by finite differences, and distances that are known in closed form."""

import pytest
import torch
from torch import Tensor, nn

from qbheat_det.modeling.pretrain import DependencyLoss, LipschitzCritic

WEIGHT = 10.0


def make_critic(dim: int, hidden_dim: int = 16) -> LipschitzCritic:
    """With every parameter random, the bilinear term included."""
    critic = LipschitzCritic(dim=dim, hidden_dim=hidden_dim)
    for parameter in critic.parameters():
        nn.init.normal_(parameter, std=0.4)
    return critic


def naive_value(critic: LipschitzCritic, x: Tensor, y: Tensor) -> Tensor:
    """Of one pair, with the first layer on [x, y] as one matrix."""
    weight = torch.cat([critic.from_x.weight, critic.from_y.weight], dim=1)
    hidden = weight @ torch.cat([x, y]) + critic.from_x.bias
    value = critic.head(critic.rest(hidden))[0]
    for i in range(len(x)):
        for j in range(len(y)):
            value = value + x[i] * critic.interaction[i, j] * y[j]
    return value


def test_values_of_all_pairs_are_those_of_one_pair_after_another() -> None:
    torch.manual_seed(0)
    critic = make_critic(3)
    x, y = torch.randn(4, 3), torch.randn(5, 3)
    found = critic(x[:, None], y[None])
    naive = torch.stack([torch.stack([naive_value(critic, a, b) for b in y]) for a in x])
    torch.testing.assert_close(found, naive)
    torch.testing.assert_close(critic(x, y[:4]), naive.diagonal())


def test_slopes_are_those_of_finite_differences_between_the_pairs() -> None:
    torch.manual_seed(1)
    critic = make_critic(3).double()
    one, other = torch.randn(2, 6, 3).double(), torch.randn(2, 6, 3).double()
    mixing = torch.rand(6).double()
    # In float32 whatever comes in, so differences are taken of a second implementation.
    found = make_float(critic).slopes((one[0], one[1]), (other[0], other[1]), mixing.float())
    step = 1e-5
    for i in range(6):
        share = mixing[i]
        pair = torch.cat([share * one[k, i] + (1 - share) * other[k, i] for k in (0, 1)])
        differences = []
        for axis in range(6):
            offset = torch.zeros(6, dtype=torch.float64)
            offset[axis] = step
            up, down = (pair + offset).split(3), (pair - offset).split(3)
            differences.append((naive_value(critic, *up) - naive_value(critic, *down)) / (2 * step))
        expected = torch.stack(differences).norm().float()
        torch.testing.assert_close(found[i], expected, rtol=1e-3, atol=1e-4)


def make_float(critic: LipschitzCritic) -> LipschitzCritic:
    copy = LipschitzCritic(dim=3, hidden_dim=16)
    copy.load_state_dict(critic.state_dict())
    return copy


def test_the_critic_learns_from_slopes_and_what_made_the_pairs_does_not() -> None:
    torch.manual_seed(2)
    critic = make_critic(3)
    x, y = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    critic.slopes((x, y), (x.roll(1, 0), y.roll(2, 0)), torch.rand(4)).sum().backward()
    assert x.grad is None
    assert y.grad is None
    for name, parameter in critic.named_parameters():
        # Between two kinks, offsets change the value and not its slope.
        learns = parameter.grad is not None and bool(parameter.grad.any())
        assert learns != name.endswith("bias"), name


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_low_precision_does_not_reach_the_critic(precision: torch.dtype) -> None:
    torch.manual_seed(3)
    critic = make_critic(4)
    x, y, mixing = torch.randn(5, 4), torch.randn(5, 4), torch.rand(5)
    exact = critic(x, y), critic.slopes((x, y), (y, x), mixing)
    with torch.autocast("cpu", dtype=precision):
        found = critic(x, y), critic.slopes((x, y), (y, x), mixing)
    torch.testing.assert_close(found, exact, rtol=0, atol=0)


def fit(critic: LipschitzCritic, draw: "Draw", steps: int) -> None:
    loss = DependencyLoss(form="dual", penalty_weight=WEIGHT)
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3, betas=(0.5, 0.9))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        values, partners, slopes = draw(critic)
        optimizer.zero_grad()
        torch.stack(list(loss(values, partners, slopes).values())).sum().backward()
        optimizer.step()
        schedule.step()


class Draw:
    """Makes what ``DependencyLoss`` takes, of new random pairs each time."""

    def __call__(self, critic: LipschitzCritic) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class ShiftedGaussians(Draw):
    """Two normal distributions in four dimensions, x and y together, one moved along an axis."""

    def __init__(self, shift: float, axis: int) -> None:
        self.shift = torch.zeros(4)
        self.shift[axis] = shift

    def pairs(self, count: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        moved, other = torch.randn(count, 4) + self.shift, torch.randn(count, 4)
        return (moved[:, :2], moved[:, 2:]), (other[:, :2], other[:, 2:])

    def __call__(self, critic: LipschitzCritic) -> tuple[Tensor, Tensor, Tensor]:
        moved, others = self.pairs(256)
        values = torch.stack([critic(*moved), critic(*others)], dim=1)
        partners = torch.zeros(256, dtype=torch.int64)
        return values, partners, critic.slopes(moved, others, torch.rand(256))


@pytest.mark.parametrize(("shift", "axis"), [(1.0, 3), (2.0, 1)])
def test_the_critic_recovers_the_distance_of_two_shifted_gaussians(shift: float, axis: int) -> None:
    # W1 of N(0, I) and N(shift, I) is the length of the shift. The penalty lets the slope exceed 1:
    # max over L of L W - weight (L - 1)^2 has L = 1 + W / (2 weight).
    torch.manual_seed(4)
    draw, critic = ShiftedGaussians(shift, axis), LipschitzCritic(dim=2, hidden_dim=32)
    fit(critic, draw, steps=250)
    moved, others = draw.pairs(20000)
    with torch.no_grad():
        found = critic(*moved).mean() - critic(*others).mean()
    slope = critic.slopes(moved, others, torch.rand(20000)).mean().item()
    assert found.item() == pytest.approx(shift * (1 + shift / (2 * WEIGHT)), rel=0.05)
    assert found.item() / slope == pytest.approx(shift, rel=0.05)

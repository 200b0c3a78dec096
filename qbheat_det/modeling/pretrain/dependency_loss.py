# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What makes two areas of an image depend on each other: two forms of one objective.

Paper: "Wasserstein Dependency Measure for Representation Learning", arXiv:1903.11780. The measure
is the Wasserstein distance between the joint distribution of two features and the product of their
marginals. With a critic f of slope 1 at most, its dual form is E f(x, y) over the joint minus E
f(x, y') over the product. The contrastive form, the one that the paper trains, has log-sum-exp over
all y of an x in place of the mean over other y, as CPC has: strangers that the critic takes for
partners weigh most.

Where pairs of joint and product are drawn apart, an offset of f in x or in y adds variance to the
dual's estimate. Here both come from all pairs of a batch: such offsets drop out of the dual, and
those in x out of the contrastive form. Which form has less variance was not measured.
"""

from torch import Tensor, nn
from torch.nn import functional as F

FORMS = ("dual", "contrastive")


class DependencyLoss(nn.Module):
    """From the critic's values of all pairs to the loss and to the estimate of the distance."""

    def __init__(self, *, form: str = "contrastive", penalty_weight: float = 10.0) -> None:
        """
        Args:
            form: "dual" or "contrastive".
            penalty_weight: on the squared excess of slopes over 1. At the optimum of the dual, the
                slope is 1 + W / (2 weight) for a distance W, and the estimate is as many times W.
                The contrastive form has no such correction: its critic does not maximise it.

        Raises:
            ValueError: another form, or a weight that is not positive.
        """
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"MODEL.WASSERSTEIN.FORM is one of {FORMS}, not '{form}'")
        if not penalty_weight > 0:
            raise ValueError(
                f"MODEL.WASSERSTEIN.PENALTY_WEIGHT is above 0, not {penalty_weight}: without it "
                "the critic would not be Lipschitz, and its values mean nothing"
            )
        self.form = form
        self.penalty_weight = penalty_weight

    def forward(self, values: Tensor, partners: Tensor, slopes: Tensor) -> dict[str, Tensor]:
        """
        Args:
            values: (N, M), of the critic for each of N x with each of M y.
            partners: (N,), which y belongs to each x.
            slopes: of the critic, as many as were measured.

        Returns:
            "loss_dependency", in the dual form the negative of the distance, and "loss_penalty".
        """
        penalty = self.penalty_weight * (slopes - 1).relu().square().mean()
        if self.form == "dual":
            return {"loss_dependency": -dual_distance(values, partners), "loss_penalty": penalty}
        contrast = F.cross_entropy(values, partners)
        return {"loss_dependency": contrast, "loss_penalty": penalty}


def dual_distance(values: Tensor, partners: Tensor) -> Tensor:
    """Returns the mean of f over pairs that belong together minus that over all that do not, 0-d.

    Args:
        values: (N, M), of the critic for each of N x with each of M y, M at least 2.
        partners: (N,), which y belongs to each x.
    """
    own = values.gather(1, partners[:, None]).squeeze(1)
    others = (values.sum(dim=1) - own) / (values.shape[1] - 1)
    return (own - others).mean()

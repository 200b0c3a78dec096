# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The one answer of a sight that cannot be had of the runs that are given."""


class NothingToSee(Exception):
    """Nothing is wrong, but there is nothing to show: a sentence that says why.

    Such as "no linear models in 'detector': it is a detector, and they belong to pre-training".
    """

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How entries come into the model zoo, how they are verified, and what is told of them."""

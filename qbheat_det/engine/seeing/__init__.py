# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What runs and weights have learned, to look at: from their files to pictures and figures."""

# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What every other folder may use: the user's errors, files, and how numbers are written."""

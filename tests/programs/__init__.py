# Copyright (c) qbheat_det contributors. Apache-2.0.

#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Serve a page in the browser: boxes on images and videos, and figures of encoders.

examples:
  # the models of the zoo, on http://127.0.0.1:7860
  qbheat app

  # your own run comes first
  qbheat app --weights output/run

  # open the page to other machines of a trusted network; there is no log-in
  qbheat app --host 0.0.0.0 --port 8080
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arguments import hide_foreign_warnings, make_parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--weights",
        nargs="+",
        default=[],
        metavar="FILE",
        help="models besides those of the zoo: files, folders of runs, or names in the zoo",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is a GPU)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    hide_foreign_warnings()
    from qbheat_det.app import serve
    from qbheat_det.core.errors import exit_on_user_error

    exit_on_user_error(serve)(args.weights, host=args.host, port=args.port, device=args.device)


if __name__ == "__main__":
    main()

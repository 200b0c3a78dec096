#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Serve a page in the browser: boxes on dropped images and videos, and what an encoder sees.

examples:
  # the models of the zoo, on http://127.0.0.1:7860
  qbheat app

  # a run of your own as well; it comes first
  qbheat app --weights output/run

  # for other machines of a network that you trust; there is no log-in
  qbheat app --host 0.0.0.0 --port 8080
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arguments import hide_foreign_warnings


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        default=[],
        metavar="FILE",
        help="own models beside those of the zoo: files, folders of runs, or names in the zoo",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, help="by default the first free one from 7860")
    parser.add_argument("--device", help="cpu or cuda; by default the GPU if there is one")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    hide_foreign_warnings()
    from qbheat_det.app import serve
    from qbheat_det.core.errors import exit_on_user_error

    exit_on_user_error(serve)(args.weights, host=args.host, port=args.port, device=args.device)


if __name__ == "__main__":
    main()

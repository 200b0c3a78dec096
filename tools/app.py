#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Serve a web page that detects objects, draws figures of encoders, and helps to label images.

examples:
  # offer the models of the model zoo at http://127.0.0.1:7860
  qbheat app

  # also offer a run of yours, as the first model
  qbheat app --weights output/run

  # accept or skip each image that qbheat select selects from your folder
  qbheat app --images photos/

  # accept or skip each correction that qbheat inspect --labels proposes
  qbheat app --suspects suspects/

  # serve the page to a trusted network; there is no authentication
  qbheat app --host 0.0.0.0 --port 8080
"""

import argparse
from collections.abc import Sequence

from arguments import check_inputs, hide_foreign_warnings, make_parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--weights",
        nargs="+",
        default=[],
        metavar="FILE",
        help="additional models to offer: files, folders of runs, or model zoo names",
    )
    parser.add_argument(
        "--images",
        nargs="+",
        default=[],
        metavar="DIR",
        help="folders of images to select from; everyone who opens the page can see these images",
    )
    parser.add_argument("--data", metavar="SRC", help="labelled images, which are not selected")
    parser.add_argument(
        "--suspects",
        nargs="+",
        default=[],
        metavar="DIR",
        help="output folders of qbheat inspect --labels; everyone who opens the page sees crops of "
        "the images",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, help="port (default: the first free one from 7860)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if a GPU is available)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    check_inputs(*args.images, *args.suspects, args.data, weights=args.weights)
    hide_foreign_warnings()
    from qbheat_det.app import serve
    from qbheat_det.core.errors import exit_on_user_error

    exit_on_user_error(serve)(
        args.weights,
        host=args.host,
        port=args.port,
        device=args.device,
        images=args.images,
        data=args.data,
        suspects=args.suspects,
    )


if __name__ == "__main__":
    main()

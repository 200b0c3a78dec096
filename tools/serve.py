#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Serve a detector over HTTP. A request has an image, and the response has boxes as JSON.

examples:
  # serve at http://127.0.0.1:8000; /docs documents the API
  qbheat serve --weights retinanet/285M_bccd
  curl --data-binary @docs/cells.jpg 'http://127.0.0.1:8000/predict?threshold=0.5'

  # serve an exported file to a trusted network; there is no authentication
  qbheat serve --weights detector.onnx --host 0.0.0.0

Requests that wait for the model are processed in one batch. On Ctrl-C or SIGTERM, the server
finishes the requests in progress and stops.
"""

import argparse
import math
from collections.abc import Sequence

from arguments import check_inputs, hide_foreign_warnings, make_parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--weights", required=True, help="a run's folder, a file, an .onnx file, or a zoo name")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="0 selects a free port (default: 8000)")
    add("--device", help="cpu or cuda (default: cuda if a GPU is available)")
    add("--fast", action="store_true", help="serve the deployed form, as in qbheat predict --fast")
    add("--batch", type=int, default=8, help="largest number of images per batch (default: 8)")
    add("--max-megabytes", type=float, default=20, help="largest request in MB (default: 20)")
    add("--max-megapixels", type=float, default=25, help="largest image in MPixel (default: 25)")
    add("--max-waiting", type=int, default=64, help="maximum of requests at a time (default: 64)")
    args = parser.parse_args(argv)
    for name in ("batch", "max_megabytes", "max_megapixels", "max_waiting"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be above 0 and finite")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    check_inputs(weights=[args.weights])
    hide_foreign_warnings()
    from qbheat_det.core.errors import UserError, exit_on_user_error

    @exit_on_user_error
    def run() -> None:
        try:
            from qbheat_det.app.server import Limits, serve
        except ImportError as error:
            raise UserError(
                f"the server needs FastAPI ({error}): pip install fastapi uvicorn"
            ) from error
        limits = Limits(args.max_megabytes, args.max_megapixels, args.max_waiting)
        serve(
            args.weights,
            host=args.host,
            port=args.port,
            device=args.device,
            fast=args.fast,
            batch_size=args.batch,
            limits=limits,
        )

    run()


if __name__ == "__main__":
    main()

#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Write one feature vector per image, to find near-duplicates or similar images.

A vector is the mean of the encoder's coarsest feature map. The encoder sees the central square of
an image. The output is a NumPy archive: "files" are the N paths, and "vectors" (N, D) are float32.

examples:
  # read the result with numpy.load("vectors.npz")
  qbheat embed --images photos/ --output vectors.npz

  # another encoder
  qbheat embed --images photos/ --weights timm://tf_efficientnet_lite0 --output vectors.npz

  # share the files among four processes
  torchrun --standalone --nproc-per-node 4 tools/embed.py --images photos/ --output vectors.npz

  # embed on a Ray cluster, from an object store; writes Parquet files to the folder of --output
  qbheat embed --engine ray --images s3://bucket/photos --output s3://bucket/vectors

Vectors are cached, except with Ray, so a repeated command computes only those of new files.

exit code: 0 on success; 1 if a file was skipped (under torchrun: 0); 2 if there is no result.
"""

import argparse
import sys

from arguments import (
    WEIGHTS,
    add_engine,
    check_inputs,
    hide_foreign_warnings,
    make_parser,
    print_ray_report,
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--images", nargs="+", required=True, metavar="PATH", help="images and folders")
    add(
        "--output",
        required=True,
        metavar="FILE",
        help="the archive to write (.npz); with --engine ray, a folder",
    )
    add("--weights", default="distill/285M", help=f"encoder: {WEIGHTS} (default: distill/285M)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if a GPU is available")
    add_engine(parser)
    args = parser.parse_args(argv)
    if args.engine == "local" and not args.output.lower().endswith(".npz"):
        parser.error(f"--output '{args.output}' must end in .npz")
    if args.engine == "ray" and args.output.lower().endswith(".npz"):
        parser.error(f"--output '{args.output}' is a folder with --engine ray: leave out .npz")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_inputs(*args.images, weights=[args.weights])
    hide_foreign_warnings()
    from qbheat_det.core.errors import exit_on_user_error
    from qbheat_det.core.sharing import run_sharing_files

    if args.engine == "ray":
        return exit_on_user_error(run_on_cluster)(args)
    return exit_on_user_error(run_sharing_files)(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Embeds as specified by the arguments, and returns the exit code."""
    import numpy as np
    from detectron2.utils import comm

    from qbheat_det.api import embed_images, find_inputs
    from qbheat_det.core.errors import UserError
    from qbheat_det.core.files import check_writable, write_atomically
    from qbheat_det.core.text import escape_controls

    check_writable(args.output)
    files = [str(file.path) for file in find_inputs(args.images) if not file.is_video]
    if not files:
        raise UserError(f"no images in {', '.join(args.images)}")
    embeddings = embed_images(files, args.weights, device=args.device)
    if not comm.is_main_process():
        return 0
    arrays = {"files": np.array(embeddings.files), "vectors": embeddings.vectors.numpy()}
    write_atomically(args.output, lambda stream: np.savez(stream, **arrays))
    count, size = embeddings.vectors.shape
    print(f"{args.output}: {count:,} vectors of {size} values")
    for path, reason in embeddings.unreadable.items():
        print(escape_controls(f"skipped {path}: {reason}"), file=sys.stderr)
    if comm.get_world_size() > 1:
        return 0
    return int(bool(embeddings.unreadable))


def run_on_cluster(args: argparse.Namespace) -> int:
    """Embeds with Ray, and returns the exit code."""
    from qbheat_det.api import find_weights
    from qbheat_det.core.errors import UserError

    try:
        from qbheat_det.inference.ray_engine import EmbeddingActor, run_on_ray
    except ImportError as error:
        raise UserError(f"--engine ray needs Ray ({error}): pip install 'ray[data]'") from error

    arguments = {"weights": find_weights(args.weights), "device": args.device}
    return print_ray_report(run_on_ray(EmbeddingActor, arguments, args.images, args.output), args)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Everything that can be seen of runs, on one page that needs nothing else.

examples:
  # a pre-training, and a detector on its frozen encoder, beside one on random weights
  python tools/report.py output/pretraining output/probe output/probe_random \\
      --output output/report.html

  # with names of your own, on pictures of your own
  python tools/report.py ours=output/pretraining random=output/random \\
      --images photos/ --output output/report.html

  # some sights only (tools/see.py --list has them all)
  python tools/report.py output/pretraining --only curves spectrum --output output/report.html

Beside report.html a folder report/ holds each picture as a file, and the numbers behind them as
JSON. What the runs' files do not allow is left out, and named at the end of the page with the
reason. The page holds its pictures, fetches nothing, and follows a light or dark screen. It is
written anew after each sight, so that Ctrl-C leaves a page of what there is.

exit code: 0; 1 if a sight went wrong (the others are on the page); 2 if a run or flag is wrong;
130 after Ctrl-C.
"""

import argparse
import json
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What Detectron2's own imports and torch.meshgrid say is of no use to people who look.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
warnings.filterwarnings("ignore", message="torch.meshgrid")

import qbheat_det  # noqa: E402, F401  registers models and data
from qbheat_det.analysis.exhibit import remove_exhibit, to_json, write_exhibit  # noqa: E402
from qbheat_det.analysis.exhibit_report import describe_exhibits  # noqa: E402
from qbheat_det.analysis.html_report import write_report  # noqa: E402
from qbheat_det.core.errors import exit_on_user_error  # noqa: E402
from qbheat_det.core.files import write_atomically  # noqa: E402
from qbheat_det.engine.seeing.flags import add_subject_flags, open_runs, read_options  # noqa: E402
from qbheat_det.engine.seeing.gather import Outcome, describe_subjects, gather  # noqa: E402
from qbheat_det.engine.seeing.options import Sight  # noqa: E402
from qbheat_det.engine.seeing.sights import SIGHTS  # noqa: E402

_NOT_YET = "not made: the report ended before, or is still being made"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    summary, examples = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_subject_flags(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/report.html"),
        metavar="FILE",
        help="the page (default: output/report.html); its files go to the folder of that name",
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", nargs="+", choices=SIGHTS, metavar="SIGHT", help="these sights")
    chosen.add_argument(
        "--without", nargs="+", choices=SIGHTS, default=[], metavar="SIGHT", help="all but these"
    )
    for sight in SIGHTS.values():
        if sight.add_flags is not None:
            sight.add_flags(parser.add_argument_group(f"of '{sight.name}'"))
    args = parser.parse_args(argv)
    if args.output.suffix not in (".html", ".htm"):
        parser.error(f"--output is a page, so it ends in .html, unlike '{args.output}'")
    return args


@exit_on_user_error
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = shlex.join(["python", "tools/report.py", *(sys.argv[1:] if argv is None else argv)])
    subjects = open_runs(args)
    names = args.only or [name for name in SIGHTS if name not in args.without]
    sights = [sight for name, sight in SIGHTS.items() if name in names]
    runs = describe_subjects(subjects)
    outcomes: list[Outcome] = []
    folder = args.output.with_suffix("")
    earlier = _list_earlier(folder)
    # A page that cannot be written is found before the work, not after it.
    _write_page(args.output, _fill_up(outcomes, sights), runs, command)
    for name in earlier:  # is not on this page, or comes anew
        remove_exhibit(name, folder)
    try:
        for outcome in gather(
            sights, subjects, lambda sight: read_options(args, sight), progress=True
        ):
            if outcome.exhibit is not None:
                write_exhibit(outcome.exhibit, folder)
            outcomes.append(outcome)
            _write_page(args.output, _fill_up(outcomes, sights), runs, command)
    except KeyboardInterrupt:
        print(f"\n{len(outcomes)} of {len(sights)} sights are on {args.output}", file=sys.stderr)
        raise
    for outcome in outcomes:
        if outcome.exhibit is None:
            verb = "failed" if outcome.is_failure else "left out"
            print(f"{outcome.sight.name} {verb}: {outcome.reason}", file=sys.stderr)
    print(f"report: {args.output}\nfiles:  {folder}")
    return 1 if any(outcome.is_failure for outcome in outcomes) else 0


def _fill_up(outcomes: Sequence[Outcome], sights: Sequence[Sight]) -> list[Outcome]:
    return [*outcomes, *(Outcome(sight, reason=_NOT_YET) for sight in sights[len(outcomes) :])]


def _write_page(
    path: Path, outcomes: Sequence[Outcome], runs: Sequence[Mapping[str, Any]], command: str
) -> None:
    content = {"runs": to_json(runs), "sights": [_account_for(outcome) for outcome in outcomes]}
    text = f"{json.dumps(content, indent=1, allow_nan=False)}\n"
    about = path.with_suffix("") / "report.json"
    write_atomically(about, lambda stream: stream.write(text.encode()))
    report = describe_exhibits(
        [outcome.exhibit for outcome in outcomes if outcome.exhibit is not None],
        runs,
        [(outcome.sight.name, outcome.reason) for outcome in outcomes if outcome.exhibit is None],
        commands=[command],
    )
    write_report(report, path)


def _list_earlier(folder: Path) -> list[str]:
    """Returns the sights that the report in that folder says it has."""
    try:
        sights = json.loads((folder / "report.json").read_bytes())["sights"]
        return [str(sight["name"]) for sight in sights if sight["made"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []  # there is none, or none of ours


def _account_for(outcome: Outcome) -> dict[str, object]:
    return {
        "name": outcome.sight.name,
        "made": outcome.exhibit is not None,
        "failed": outcome.is_failure,
        "reason": outcome.reason,
    }


if __name__ == "__main__":
    sys.exit(main())

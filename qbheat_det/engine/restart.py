# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Whether a start continues the run in ``OUTPUT_DIR``, or another start has taken it over."""

import argparse
import logging
from pathlib import Path

from detectron2.engine import HookBase
from detectron2.utils import comm

from qbheat_det.core.errors import UserError

from .hooks import TrainingRun, is_saved
from .mirror import fetch_run
from .resume import name_last_checkpoint
from .run_flags import RunFlags
from .writers import RUN_FILE, find_launch, read_run_record

logger = logging.getLogger(__name__)


def decide_to_resume(args: argparse.Namespace | RunFlags) -> bool:
    """Returns whether to continue the run in ``OUTPUT_DIR``; the same on all processes.

    With ``--resume``. Without it too, where the main process finds a checkpoint of a run that was
    last started under the same ``--rdzv-id`` of torchrun: machines came or went, or the job was
    put back into its queue. A run that ended before its first checkpoint starts anew.

    Raises:
        UserError: the processes find different checkpoints, or ``SOLVER.CHECKPOINT_URL`` cannot
            be read.
    """
    flags = RunFlags.read(args)
    if flags.eval_only:
        return flags.resume
    cfg = flags.load_config()
    if cfg.SOLVER.CHECKPOINT_URL:
        if comm.get_local_rank() == 0:
            fetch_run(cfg)
        comm.synchronize()
    folder = Path(cfg.OUTPUT_DIR)
    last = name_last_checkpoint(folder)
    is_restart = bool(last) and not flags.resume and _began_in_this_launch(folder)
    views = comm.all_gather((last, flags.resume or is_restart))
    main, resumes = views[0]
    if not resumes:
        return False
    if others := {name for name, _ in views} - {main}:
        raise UserError(
            f"OUTPUT_DIR '{folder}' ends with '{main or 'nothing'}' on the first machine, but with "
            f"'{others.pop() or 'nothing'}' on another: all must see one folder, or bring the run "
            "from SOLVER.CHECKPOINT_URL"
        )
    return True


def _began_in_this_launch(folder: Path) -> bool:
    launch, starts = find_launch(), read_run_record(folder / RUN_FILE)
    return bool(launch and starts and starts[-1].get("launch") == launch)


class YieldToNewerStart(HookBase):
    """Ends a run that was started again elsewhere, before it saves over that one's checkpoints.

    Where torchrun takes a machine for dead that is only slow, others continue without it.
    """

    trainer: TrainingRun

    def before_train(self) -> None:
        """Counts the starts up to this one."""
        self._file = Path(self.trainer.cfg.OUTPUT_DIR) / RUN_FILE
        self._count = len(read_run_record(self._file))

    def after_step(self) -> None:
        """Looks for a later start where a checkpoint is due.

        Raises:
            UserError: there is one.
        """
        if not is_saved(self.trainer, self.trainer.cfg.SOLVER.CHECKPOINT_PERIOD):
            return
        if later := read_run_record(self._file)[self._count :]:
            raise UserError(
                f"'{self._file}' has a later start, of {later[0].get('started')}: it continues, "
                "and this one ends without saving"
            )

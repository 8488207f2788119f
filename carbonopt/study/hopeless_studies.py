"""Ends of studies whose trials can only fail."""

import re

from carbonopt.core.errors import CarbonoptError
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.spec.launch_settings import SlurmLaunch
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData
from carbonopt.study.trial_checkpoint import Checkpoint

# A study ends if its trials so far, or its trials and probes, are at least this many and have all
# failed in the same way.
_FAILURES = 3
_SCRIPT_FAILURES = {"bad_input": 1, "no_quality": 2}  # fewer for scripts, by kind of failure
_MEND = "fix that, and give another folder, because this one keeps the study as it was"
_NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")
# Shares of a Slurm job's usable time; see `check_job_is_long_enough`.
_NEARLY_ALL = 0.9
_MOST = 0.5


def always_the_same_failure(data: StudyData) -> str | None:
    """Return that all trials failed in the same way, as a reason to end; None: they did not."""
    for runs, name in (
        (data.records, "trials"),
        ((*data.probes, *data.records), "probes and trials"),
    ):
        over = [record for record in runs if record.state is not TrialState.RUNNING]
        failures = [
            record.failure
            for record in over
            if record.state is TrialState.FAILED and record.failure and not record.stop_reason
        ]
        # Numbers are ignored: the same error may name each trial's own learning rate.
        reasons = {
            (failure.kind, _NUMBER.sub("#", failure.text.partition("\n")[0]))
            for failure in failures
        }
        # No configuration repairs an invalid report of a script, and hardly one a missing quality.
        enough = (
            _SCRIPT_FAILURES.get(failures[0].kind, _FAILURES)
            if data.config.is_script and failures
            else _FAILURES
        )
        if len(over) >= enough and len(failures) == len(over) and len(reasons) == 1:
            text = failures[-1].text.partition("\n")[0]
            if len(failures) == 1:
                return f"the first trial failed ({text.rstrip('.')}), and all others would: {_MEND}"
            count = "both" if len(failures) == 2 else f"all {len(failures)}"
            return f"{count} {name} failed in the same way ({text.rstrip('.')}): {_MEND}"
    return None


def check_job_is_long_enough(
    earlier: TrialRecord | None,
    checkpoint: Checkpoint | None,
    data: StudyData,
    config: StudyConfig,
) -> None:
    """Raise CarbonoptError if a trial would be cut off in every further Slurm job, too.

    It would be if it was cut off after more than 90 % of a job's usable time. If it was cut off
    twice, and was its job's first run the last time, 50 % is enough: the job spent the rest on
    starting. A trial that saves a checkpoint within a job, or now will, is not too long: it goes on
    from there.

    Args:
        earlier: The trial's record after it was interrupted; None: it has not run yet.
        checkpoint: Its last checkpoint, if there is one.
        data: The study.
        config: The study's configuration now, whose jobs may have become longer.
    """
    launch = config.launch
    if not isinstance(launch, SlurmLaunch) or earlier is None or earlier.duration_s is None:
        return
    took_s = earlier.duration_s.total
    reached = max(earlier.continued_at_steps, default=0)
    if checkpoint is None:
        # The earlier attempts may have had no checkpoints.
        is_saved = config.checkpoint is not None and (
            60 * config.checkpoint.every_minutes < launch.usable_s
        )
    else:
        is_saved = checkpoint.step > reached
        took_s -= checkpoint.readings_s if reached else 0.0
    is_second = earlier.attempt > 1 and _began_its_job(earlier, data)
    if is_saved or took_s <= (_MOST if is_second else _NEARLY_ALL) * launch.usable_s:
        return
    times = f" {earlier.attempt} times, the last time" if is_second else ""
    had = (
        f"trial {earlier.trial} was cut off{times} after {took_s:.0f} s, of {launch.usable_s} s"
        f" that a job of {launch.time} min has for its start and its trials"
    )
    raise CarbonoptError(
        f"a job must be long enough for a trial, but {had}; give a longer launch.time, or"
        " checkpoint: {every_minutes: 30}, with which a trial goes on in the next job."
    )


def _began_its_job(record: TrialRecord, data: StudyData) -> bool:
    """Return whether a trial was the first run of its worker, which in Slurm is a job's attempt."""
    others = [run for run in data.records if run.trial != record.trial]
    return not any(
        run.worker == record.worker and (run.started_at or "") < (record.started_at or "")
        for run in (*others, *data.probes)
    )

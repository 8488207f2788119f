"""Ends of studies whose trials can only fail."""

import re

from carbonopt.core.errors import CarbonoptError
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.spec.launch_settings import SlurmLaunch
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData

# A study ends if its trials so far, or its trials and probes, are at least this many and have all
# failed in the same way.
_FAILURES = 3
_SCRIPT_FAILURES = {"bad_input": 1, "no_quality": 2}  # fewer for scripts, by kind of failure
_MEND = "fix that, and give another --out, because this folder keeps the study as it was"
_NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")
_NEARLY_ALL = 0.9  # share of a Slurm job's usable time


def always_the_same_failure(data: StudyData) -> str | None:
    """Return why a study ends whose trials all failed in the same way, as the next one would."""
    for runs, name in (
        (data.records, "trials"),
        ((*data.probes, *data.records), "probes and trials"),
    ):
        over = [record for record in runs if record.state is not TrialState.RUNNING]
        failures = [
            record.failure
            for record in over
            if record.state is TrialState.FAILED and record.failure
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


def check_job_is_long_enough(earlier: TrialRecord | None, config: StudyConfig) -> None:
    """Raise CarbonoptError if a trial was cut off after nearly a whole Slurm job.

    It would be cut off again in every further job.
    """
    launch = config.launch
    if not isinstance(launch, SlurmLaunch) or earlier is None or earlier.duration_s is None:
        return
    if (took_s := earlier.duration_s.total) > _NEARLY_ALL * launch.usable_s:
        had = (
            f"trial {earlier.trial} was cut off after {took_s:.0f} s, nearly all that a job of"
            f" {launch.time} min has"
        )
        raise CarbonoptError(
            f"a job must be long enough for a trial, but {had}; give a longer launch.time."
        )

"""What a trial's record says of the trial."""

import pytest

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.trial import QualityResult, StopReason, TrialRecord, TrialState


@pytest.mark.parametrize(
    ("state", "stop_reason", "has_finished"),
    [
        (TrialState.RUNNING, None, False),
        (TrialState.FAILED, StopReason.INTERRUPTED, False),
        (TrialState.FAILED, None, True),
        (TrialState.PRUNED, StopReason.BUDGET, True),
        (TrialState.COMPLETE, None, True),
    ],
)
def test_a_trial_has_finished_if_it_neither_runs_nor_will_be_run_again(
    state: TrialState, stop_reason: StopReason | None, has_finished: bool
) -> None:
    record = TrialRecord(
        trial=0,
        state=state,
        stop_reason=stop_reason,
        seed=0,
        params=TrialParams(),
        quality=QualityResult(name="perplexity"),
    )
    assert record.has_finished is has_finished

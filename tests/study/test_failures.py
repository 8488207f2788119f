"""When a study whose runs all fail ends by itself."""

from small_studies import probe, study, trial

from carbonopt.core.trial import Failure, StopReason, TrialState
from carbonopt.study.loop import _always_the_same_failure

FAILED = {"state": TrialState.FAILED, "stop_reason": None}
HERE, THERE = (Failure(kind="crash", text=f"no backend {name}.\nlog") for name in ("here", "there"))


def failing(number: int, failure: Failure = HERE):
    return probe(number, **FAILED, failure=failure)


def test_it_ends_after_three_that_fail_in_the_same_way() -> None:
    three = study(probes=(failing(0), failing(1), failing(2)))
    assert _always_the_same_failure(three) == (
        "all 3 probes and trials failed in the same way (no backend here): mend that first"
    )
    mixed = study(trial(0, perplexity=None, **FAILED, failure=HERE), probes=(failing(0), failing(1)))
    assert "all 3 probes and trials" in str(_always_the_same_failure(mixed))
    trials = [trial(number, perplexity=None, **FAILED, failure=HERE) for number in range(3)]
    assert "all 3 trials failed" in str(_always_the_same_failure(study(*trials, probes=(probe(0),))))


def test_it_goes_on_where_anything_worked_or_failed_otherwise() -> None:
    assert _always_the_same_failure(study(probes=(failing(0), failing(1)))) is None
    assert _always_the_same_failure(study(probes=(failing(0), failing(1), failing(2, THERE)))) is None
    assert _always_the_same_failure(study(probes=(failing(0), probe(1), failing(2)))) is None
    interrupted = probe(2, state=TrialState.FAILED, stop_reason=StopReason.INTERRUPTED)
    assert _always_the_same_failure(study(probes=(failing(0), failing(1), interrupted))) is None

"""When a study whose runs all fail ends by itself."""

from small_studies import probe, script_run, script_study, study, trial

from carbonopt.core.trial import Failure, StopReason, TrialState
from carbonopt.study.hopeless_studies import always_the_same_failure

FAILED = {"state": TrialState.FAILED, "stop_reason": None}
HERE, THERE = (Failure(kind="crash", text=f"no backend {name}.\nlog") for name in ("here", "there"))


def failing(number: int, failure: Failure = HERE):
    return probe(number, **FAILED, failure=failure)


def test_it_ends_after_three_that_fail_in_the_same_way() -> None:
    three = study(probes=(failing(0), failing(1), failing(2)))
    ended = str(always_the_same_failure(three))
    assert (
        "all 3 probes and trials" in ended
        and "(no backend here)" in ended
        and "another folder" in ended
    )
    mixed = study(
        trial(0, perplexity=None, **FAILED, failure=HERE), probes=(failing(0), failing(1))
    )
    assert "all 3 probes and trials" in str(always_the_same_failure(mixed))
    trials = [trial(number, perplexity=None, **FAILED, failure=HERE) for number in range(3)]
    assert "all 3 trials failed" in str(always_the_same_failure(study(*trials, probes=(probe(0),))))


def test_it_goes_on_where_anything_worked_or_failed_otherwise() -> None:
    assert always_the_same_failure(study(probes=(failing(0), failing(1)))) is None
    assert (
        always_the_same_failure(study(probes=(failing(0), failing(1), failing(2, THERE)))) is None
    )
    assert always_the_same_failure(study(probes=(failing(0), probe(1), failing(2)))) is None
    interrupted = probe(2, state=TrialState.FAILED, stop_reason=StopReason.INTERRUPTED)
    assert always_the_same_failure(study(probes=(failing(0), failing(1), interrupted))) is None


def test_what_a_script_may_not_report_ends_its_study_at_once() -> None:
    refused = Failure(
        kind="bad_input", text="accuracy must be at most 1, but is 86.2; divide it by 100."
    )
    unread = Failure(
        kind="no_quality", text="workload.quality_from.pattern, 'acc 86.2', matches nothing"
    )
    for failure, enough in ((refused, 1), (unread, 2)):
        run = {**FAILED, "failure": failure}
        runs = [script_run(number, None, **run) for number in range(enough)]
        assert always_the_same_failure(script_study(*runs[:-1])) is None
        assert "86.2" in str(always_the_same_failure(script_study(*runs)))
    assert (
        always_the_same_failure(script_study(script_run(0, 25.0), script_run(1, None, **run)))
        is None
    )
    assert always_the_same_failure(study(trial(0, perplexity=None, **run))) is None, (
        "another configuration may do"
    )


def test_an_error_that_names_other_numbers_is_the_same() -> None:
    errors = [
        Failure(kind="crash", text=f"code 1: ValueError: no rate of {rate}\nlog")
        for rate in (1e-5, 0.25, 3)
    ]
    runs = [
        trial(number, perplexity=None, **FAILED, failure=error)
        for number, error in enumerate(errors)
    ]
    assert "no rate of 3" in str(always_the_same_failure(study(*runs)))

"""Trials that cost as much as the recommended one, whose difference is noise."""

from typing import Any

import pytest
from small_studies import study, trial

from carbonopt.analysis.equal_costs import EqualCosts, equal_costs
from carbonopt.analysis.recommend import recommend
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.report.assemble import top
from carbonopt.report.document import Level
from carbonopt.report.study_view import StudyView


def found(*records: TrialRecord, **changes: Any) -> EqualCosts | None:
    data = study(*records, **changes)
    return equal_costs(data, recommend(data))


def test_trials_of_other_rates_that_met_the_target_are_equally_cheap() -> None:
    """Others are not: a miss, another batch, a stopped trial, a repeat."""
    other_batch = trial(3, 1.2e-3, params={"global_batch_size": 8})
    stopped = trial(4, 1.1e-3, state=TrialState.PRUNED)
    repeat = trial(5, 1.05e-3, params={"learning_rate": 1e-3}, repeat_of=0, seed=4)
    equal = found(
        trial(0, 1.0e-3), trial(1, 1.02e-3), trial(2, 1.01e-3, 7.0), other_batch, stopped, repeat
    )
    assert equal is not None
    assert (equal.trials, equal.dimensions) == ((1,), ("learning_rate",))
    assert equal.difference == pytest.approx(1 - 1.02e-3 / ((1.0e-3 + 1.05e-3) / 2), abs=1e-9)


def test_there_are_none_where_the_cost_is_another_or_nothing_is_recommended() -> None:
    longer = trial(1, 1.5e-3, params={"epochs": 1})
    assert found(trial(0), longer) is None
    assert found(trial(0, perplexity=7.0), trial(1, perplexity=8.0)) is None


def test_the_report_calls_the_difference_noise() -> None:
    view = StudyView(study(trial(0, 1.0e-3), trial(1, 1.04e-3)))
    (said,) = (caveat for caveat in top(view).caveats if caveat.key == "equal_costs")
    assert (said.level, said.numbers["trials"]) == (Level.NOTE, (1,))
    assert said.numbers["difference"] == pytest.approx(0.04)
    assert "learning_rate" in said.text and "noise" in said.text

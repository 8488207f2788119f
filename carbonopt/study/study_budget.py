"""The limits of a study's budget, and what is left of them."""

from datetime import timedelta

from carbonopt.analysis.remaining import limits, remaining_time, used_up
from carbonopt.core.format import count_text
from carbonopt.core.trial import StopReason
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.study_storage import Snapshot
from carbonopt.study.account import SessionAccount
from carbonopt.study_file.study_checks import CheckedStudy


def all_trials_run(trials: int | None, seen: Snapshot) -> str | None:
    """Return, in words, that all trials of a budget have been run; None: some are left.

    Args:
        trials: `budget.trials`; None: it limits no trials.
        seen: The study.
    """
    if trials is None or (finished := seen.finished_count()) < trials:
        return None
    if finished > trials:  # the study file has fewer now
        more = f"{finished - trials} more than the budget has"
        return f"{count_text(finished, 'trial')} have been run, {more}"
    if trials == 1:
        return "the one trial of the budget has been run"
    return f"all {trials} trials of the budget have been run"


def budget_used(trials: int | None, seen: Snapshot, limit: str | None) -> str | None:
    """Return which part of a budget is used up, in words; None: there is some left.

    A limit that cut one of the search's trials off ended the search, even if that was the last of
    `budget.trials`.

    Args:
        trials: `budget.trials`; None: it limits no trials.
        seen: The study.
        limit: Which other limit is reached, in words; None: none is.
    """
    cut_off = any(
        record.counts_for_budget and record.stop_reason is StopReason.BUDGET
        for record in seen.data.records
    )
    all_run = all_trials_run(trials, seen)
    return limit or all_run if cut_off else all_run or limit


def limit_reached(checked: CheckedStudy, used_hours: float, energy_kwh: float) -> str | None:
    """Return which limit of the budget is reached, in words, the number of trials aside.

    Args:
        checked: The study.
        used_hours: The hours in which it has worked.
        energy_kwh: The energy that it has used, without PUE.
    """
    emissions_kg_co2e = checked.emissions_kg_co2e(energy_kwh)
    return used_up(limits(checked.config.budget, used_hours, energy_kwh, emissions_kg_co2e))


class StudyBudget:
    """The limits of a study's budget, the number of trials aside.

    Args:
        checked: The study.
        account: The account of this worker's session.
        hours_before: Hours in which at least one worker has worked before this session; they count,
            too.
    """

    def __init__(self, checked: CheckedStudy, account: SessionAccount, hours_before: float) -> None:
        self._checked = checked
        self._account = account
        self._hours_before = hours_before

    @property
    def limits_energy(self) -> bool:
        budget = self._checked.config.budget
        return budget.energy_kwh is not None or budget.emissions_kg_co2e is not None

    @property
    def used_hours(self) -> float:
        """The hours in which the study has worked; waiting for its schedule's hours is no work."""
        return self._hours_before + (self._account.duration_s - self._account.waited_s) / 3600

    def remaining(self, data: StudyData, workers: int) -> timedelta | None:
        """Estimate how long the rest of the study takes (see `remaining_time`)."""
        energy_kwh = data.spent_kwh()
        return remaining_time(
            self._checked.config,
            data,
            self.used_hours,
            energy_kwh,
            self._checked.emissions_kg_co2e(energy_kwh),
            workers,
        )

    def limit_reached(self, energy_kwh: float) -> str | None:
        """Return which limit a study that has used this energy has reached, in words."""
        return limit_reached(self._checked, self.used_hours, energy_kwh)

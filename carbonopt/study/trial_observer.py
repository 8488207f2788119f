"""The interface of what follows a study's trials."""

from typing import Protocol

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.trial import TrialRecord
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.trial_spec import TrialSpec


class TrialObserver(Protocol):
    """The interface of what follows trials: the live display, trackers and notifications."""

    def trial_started(self, spec: TrialSpec, started_at: str | None) -> None:
        """Learn of a trial before its processes start.

        Args:
            spec: What its processes are to do.
            started_at: When its attempt began, as in its record; ISO 8601, UTC.
        """

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None: ...
    def trial_ended(self, record: TrialRecord) -> None: ...


class StudyObserver(TrialObserver, Protocol):
    """The interface of what follows trials and has to know their study."""

    def study_began(self, data: StudyData) -> None: ...

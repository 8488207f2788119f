"""A study as the standards' forms describe it: its data, and the analyses that they share."""

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from carbonopt import __version__
from carbonopt.analysis.footprint import Footprint
from carbonopt.analysis.recommend import Recommendation
from carbonopt.analysis.training_work import TrainingWork
from carbonopt.core.trial import COMPONENTS, TrialRecord
from carbonopt.spec.study_data import StudyData


@dataclass(frozen=True)
class ExportedStudy:
    """A study's data with its recommendation, its footprint and its work.

    All forms take their figures from here, so they agree with each other and with report.json.
    """

    data: StudyData
    recommendation: Recommendation
    spent: Footprint
    work: TrainingWork

    @property
    def status(self) -> str:
        """Return `final`, or `draft` for a study that has not ended."""
        return "draft" if self.data.ended is None else "final"

    @cached_property
    def id(self) -> uuid.UUID:
        """The study's identifier, from its name and when it began."""
        began = min((session.started_at for session in self.data.sessions), default="")
        return uuid.uuid5(uuid.NAMESPACE_URL, f"carbonopt:{self.data.config.name}:{began}")

    @property
    def last_active(self) -> datetime | None:
        """The end of the last session, in UTC; None: no session has begun."""
        ends = (
            datetime.fromisoformat(session.started_at) + timedelta(seconds=session.duration_s)
            for session in self.data.sessions
        )
        last = max(ends, default=None)
        return None if last is None else last.astimezone(UTC)

    @property
    def record(self) -> TrialRecord | None:
        """The recommended trial; None: no configuration is recommended."""
        number = self.recommendation.trial
        return next((record for record in self.data.records if record.trial == number), None)

    @property
    def counted(self) -> str:
        """Say which components' energy counts, how each is known, and of which trials none is."""
        carbon, sources = self.data.config.carbon, self.data.provenance.energy_source
        names = ("gpu",) if carbon.objective == "gpu" else COMPONENTS
        counted = ", ".join(f"{name.upper()} {sources[name]}" for name in names if name in sources)
        unmeasured = ", ".join(map(str, self.spent.unmeasured_trials))
        return counted + (f"; not known and not counted: trials {unmeasured}" if unmeasured else "")

    def head(self) -> dict[str, Any]:
        """Return the keys with which each JSON form begins."""
        return {
            "study": self.data.config.name,
            "status": self.status,
            "made_with": f"carbonopt {__version__}",
        }

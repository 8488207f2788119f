"""Shows a running study in Python's log, for callers that print nothing."""

import logging

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.format import emissions_text, energy_text
from carbonopt.core.trial import TrialRecord
from carbonopt.report.study_text import trials_text
from carbonopt.spec.study_data import PlannedStart, StudyData
from carbonopt.spec.trial_spec import TrialSpec

LOG = logging.getLogger("carbonopt")
# Without a handler of the program's own, Python would print warnings on standard error.
LOG.addHandler(logging.NullHandler())


class LoggingDisplay:
    """A display of a running study in the log "carbonopt", which implements `StudyDisplay`.

    Warnings have the level WARNING; the beginnings and ends of trials have INFO, evaluations
    DEBUG.
    """

    def warn(self, text: str) -> None:
        LOG.warning("%s", text)

    def preparing(self, anything: bool) -> None:
        LOG.info("%s", "preparing data and model" if anything else "starting")

    def study_started(self, data: StudyData, hours_before: float) -> None:
        LOG.info("%s: before: %s", data.config.name, trials_text(data.records))

    def used(self, hours: float, energy_kwh: float) -> None:
        """Log nothing: the ends of trials say what they used."""

    def waiting(self, start: PlannedStart) -> None:
        LOG.info("waiting until %s", start.local_time)

    def trial_started(self, spec: TrialSpec, started_at: str | None) -> None:
        LOG.info("trial %d begins", spec.number)

    def trial_ended(self, record: TrialRecord) -> None:
        LOG.info("trial %d %s", record.trial, _outcome(record))

    def probe_started(self, spec: TrialSpec) -> None:
        LOG.info("probe %d begins", spec.number)

    def probe_ended(self, record: TrialRecord) -> None:
        LOG.info("probe %d %s", record.trial, _outcome(record))

    def progress(self, step: int, total_steps: int, train_kwh: float) -> None:
        """Log nothing: it comes many times a second."""

    def still_running(self, spent_kwh: float) -> None:
        """Log nothing: it comes twice a second."""

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None:
        LOG.debug("trial %d, step %d: %s", number, point.step, point.value)

    def close(self) -> None:
        """End the display, which holds nothing."""


def _outcome(record: TrialRecord) -> str:
    """Return how a trial ended, in a few words."""
    parts = [
        record.state.value,
        f"({record.stop_reason.value})" if record.stop_reason else "",
        f"{record.quality.name} {record.value:.4g}" if record.value is not None else "",
        energy_text(record.energy_kwh.total) if record.energy_kwh else "",
        emissions_text(record.emissions_kg_co2e) if record.emissions_kg_co2e is not None else "",
    ]
    return " ".join(filter(None, parts))

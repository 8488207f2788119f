"""Everything the storage knows of a study, as frozen values: what analysis and reports are made from, anywhere."""

from typing import Literal

from carbonopt.config import StudyConfig
from carbonopt.trial import Frozen, Prepared, TrialRecord

HowKnown = Literal["measured", "modelled", "recorded"]  # recorded: a replay's table says so


class Intensity(Frozen):
    """The reference carbon intensity and where it comes from."""

    g_co2e_per_kwh: float
    source: str  # one phrase, such as "given in the study file"
    place: str | None = None  # such as "California, USA"


class Hardware(Frozen):
    """The machine that trials ran on."""

    cpu: str
    cpu_cores: int
    ram_gib: float
    gpus: tuple[str, ...] = ()  # names of the launch's GPUs, in their order
    driver: str | None = None


class Provenance(Frozen):
    """What a reader needs to judge the figures. `known` says of gpu, cpu and ram how their energy is known; a component
    that is not in the figures is absent."""

    hardware: Hardware | None  # None: a replay, whose table says nothing of it
    versions: dict[str, str]
    intensity: Intensity
    known: dict[str, HowKnown]
    study_file: str  # its text


class SessionLedger(Frozen):
    """What one call of `carbonopt run` spent beside its trials, in kWh without PUE."""

    started_at: str  # ISO 8601, UTC
    duration_s: float = 0.0
    prepare_kwh: float = 0.0
    gap_kwh: float = 0.0  # between trials
    outer_kwh: float | None = (
        None  # the whole call by a second tracker that knows no phases: checks the sum of all parts
    )


class StudyData(Frozen):
    config: StudyConfig
    records: tuple[TrialRecord, ...]  # by trial number, every state
    sessions: tuple[SessionLedger, ...]
    provenance: Provenance
    prepared: Prepared | None = None
    ended: str | None = None  # why the study ended, in words; None: it has not

    def spent_kwh(self) -> float:
        """Energy of the whole study so far in kWh, PUE not in: all trials and attempts, preparation, gaps."""
        sessions_kwh = sum(session.prepare_kwh + session.gap_kwh for session in self.sessions)
        return sum(record.spent_kwh for record in self.records) + sessions_kwh

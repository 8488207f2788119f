"""Everything the storage knows of a study, as frozen values: what analysis and reports are made from, anywhere."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Literal

from pydantic import Field, model_validator

from carbonopt.core.config import StudyConfig
from carbonopt.core.errors import BadInput
from carbonopt.core.trial import Prepared, TrialRecord
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.core.values import Finite, Frozen

_APART_S = 2.0  # calls that overlap by less may have come one after the other: when one began is known to the second
EnergySource = Literal["measured", "modelled", "recorded"]  # recorded: a replay's table says so


class Intensity(Frozen):
    """The reference carbon intensity and where it comes from."""

    g_co2e_per_kwh: Finite
    source: str  # one phrase, such as "given in the study file"
    place: str | None = None  # such as "California, USA"
    year: int | None = None  # that the figure is of; None: its source does not say


class CarbonTrace(Frozen):
    """Carbon intensity by the hour, for pricing the same joules at other hours. The search never sees it."""

    source: str  # the file's name, without its folder
    start: str  # ISO 8601, UTC: where the first hour begins
    g_co2e_per_kwh: tuple[Finite | None, ...]  # of each hour, one after the other; None: the file has none for it

    @model_validator(mode="after")
    def _has_hours(self) -> "CarbonTrace":
        try:
            begin = datetime.fromisoformat(self.start)
            begin + timedelta(hours=len(self.g_co2e_per_kwh))
        except (ValueError, OverflowError) as error:
            raise ValueError(f"start must be an ISO 8601 time before the year 10000, but is {self.start!r}") from error
        if begin.utcoffset() != timedelta(0):
            raise ValueError(f"start must be in UTC, but is {self.start!r}")
        return self


class Hardware(Frozen):
    nodes: int = 1
    cpu: str  # of each node, as the cores and the RAM
    cpu_cores: int
    ram_gib: float
    gpus: tuple[str, ...] = ()  # names of the launch's GPUs, of all nodes, in their order
    driver: str | None = None
    gpu_memory_gib: float | None = None  # of the smallest of the GPUs


class IdlePower(Frozen):
    """What one GPU draws while nothing runs on it, from its energy counter."""

    gpu: int  # NVML index
    power_w: float  # mean
    spread_w: float  # standard deviation of windows of a second
    windows: int
    tick_s: float  # how long its counter stands still


class Provenance(Frozen):
    """What a reader needs to judge the figures."""

    hardware: Hardware | None  # None: a replay, whose table says nothing of it
    versions: dict[str, str]
    intensity: Intensity
    energy_source: dict[str, EnergySource]  # of gpu, cpu and ram; absent: one that is not in the figures
    models: dict[str, str] = Field(default_factory=dict)  # of cpu and ram, where modelled: how, in words
    study_file: str  # its text

    @property
    def is_replay(self) -> bool:
        """Energy comes from a table of recorded runs: nothing was trained here."""
        return "recorded" in self.energy_source.values()


class InputFile(Frozen):
    """A file of this machine that trials depend on: one that the study file names, or one in a folder that it names."""

    path: str  # absolute
    bytes: int
    mtime_ns: int
    pieces: int = 0  # of 1 MiB, evenly spread, that sha256 is over; 0: it is over the whole file
    sha256: str | None = None  # None: nobody has looked into it yet


class SessionLedger(Frozen):
    """What one call of `carbonopt run` spent beside its trials, in kWh without PUE."""

    started_at: str  # ISO 8601, UTC
    worker: str | None = None  # the call's identity; None: a study from before calls had one
    duration_s: Finite = 0.0
    prepare_kwh: Finite = 0.0
    gap_kwh: Finite = 0.0  # between trials
    outer_kwh: float | None = None  # the whole call by one reading at its begin and one now: checks the parts' sum
    slurm_kwh: float | None = None  # likewise, of all that the nodes drew, by Slurm's own reading of them
    machine_share: float | None = None  # of its machine's CPU and RAM that it counts; None: agents do, or not known
    prepare_gpu_kwh: float | None = None  # the GPUs' part of the three above; None: no GPU was measured
    gap_gpu_kwh: float | None = None
    outer_gpu_kwh: float | None = None
    idle: tuple[IdlePower, ...] = ()  # each GPU, before the call's first trial


def wall_clock_s(sessions: Iterable[SessionLedger], until: datetime | None = None) -> float:
    """How long at least one of these calls worked, in seconds: what several did at once counts once. `until`: what was
    later doesn't count."""
    spans = []
    for session in sessions:
        begin = datetime.fromisoformat(session.started_at)
        spans.append((begin, begin + timedelta(seconds=session.duration_s)))
    total, reached = timedelta(0), None
    for begin, end in sorted(spans):
        begin, end = (moment if until is None else min(moment, until) for moment in (begin, end))
        reached = begin if reached is None else reached
        total += max(end - max(begin, reached), timedelta(0))
        reached = max(end, reached)
    return total.total_seconds()


def counted_at_once(sessions: Iterable[SessionLedger]) -> dict[str, float]:
    """For each machine, how many times the calls that worked there at once counted its CPU and RAM, at most."""
    spans: dict[str, list[tuple[float, float, float]]] = {}
    for session in sessions:
        if session.worker is not None and session.machine_share is not None:
            begin_s = datetime.fromisoformat(session.started_at).timestamp()
            host = session.worker.rsplit("-", 2)[0]  # as `storage.workers` names workers
            spans.setdefault(host, []).append((begin_s, begin_s + session.duration_s, session.machine_share))
    return {
        host: max(
            sum(
                share
                for begin_s, end_s, share in of_host
                if min(end_s, own_end_s) - max(begin_s, own_begin_s) > _APART_S
            )
            for own_begin_s, own_end_s, _ in of_host
        )
        for host, of_host in spans.items()
    }


class StudyData(Frozen):
    config: StudyConfig
    records: tuple[TrialRecord, ...]  # by trial number, every state
    sessions: tuple[SessionLedger, ...]
    probes: tuple[TrialRecord, ...] = ()  # by their own numbers: a few steps alone, to know what a step takes
    provenance: Provenance
    prepared: Prepared | None = None
    trace: CarbonTrace | None = None
    inputs: tuple[InputFile, ...] | None = None  # as the first trial found them; None: a study that didn't note them
    ended: str | None = None  # why the study ended, in words; None: it has not

    @model_validator(mode="after")
    def _has_possible_batches(self) -> "StudyData":
        """Said once and here, not wherever a report first divides them. A BadInput leaves pydantic as it is."""
        for record in self.records:
            try:
                _ = record.params.gradient_accumulation_steps
            except BadInput as error:
                raise BadInput(f"trial {record.trial}: {str(error).removesuffix('.')}") from error
        return self

    def emissions_kg_co2e(self, energy_kwh: float) -> float:
        """At the study's reference intensity, PUE in."""
        return emissions_kg_co2e(energy_kwh, self.provenance.intensity.g_co2e_per_kwh, self.config.carbon.pue)

    def spent_kwh(self) -> float:
        """Energy of the whole study so far in kWh, PUE not in: all trials and attempts, probes, preparation, gaps."""
        sessions_kwh = sum(session.prepare_kwh + session.gap_kwh for session in self.sessions)
        return sum(record.spent_kwh for record in (*self.records, *self.probes)) + sessions_kwh

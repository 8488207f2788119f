"""Everything that the storage knows of a study, as frozen values.

Analysis and reports can be made from these alone, on any machine.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Literal

from pydantic import Field, model_validator

from carbonopt.core.dimensions import DIMENSIONS
from carbonopt.core.errors import BadInput
from carbonopt.core.trial import TrialRecord
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.core.values import Finite, Frozen, Time
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.trial_spec import Prepared

# Calls that overlap by less may have come one after the other, as the start of each is known to the
# second.
_APART_S = 2.0
EnergySource = Literal["measured", "modelled", "recorded"]  # recorded: from a replay's table


class Intensity(Frozen):
    """The reference carbon intensity and its source."""

    g_co2e_per_kwh: Finite
    source: str  # one phrase, such as "given in the study file"
    place: str | None = None  # such as "California, USA"
    year: int | None = None  # the year of the figure; None: its source does not give it


class CarbonTrace(Frozen):
    """Carbon intensity by the hour, for pricing the same joules at other hours.

    The search never sees it.
    """

    source: str  # the file's name, without its folder
    start: str  # when the first hour begins; ISO 8601, UTC
    # the intensity of each hour, in order; None: the file lacks this hour
    g_co2e_per_kwh: tuple[Finite | None, ...]

    @model_validator(mode="after")
    def _has_hours(self) -> "CarbonTrace":
        try:
            begin = datetime.fromisoformat(self.start)
            begin + timedelta(hours=len(self.g_co2e_per_kwh))
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"start must be an ISO 8601 time before the year 10000, but is {self.start!r}"
            ) from error
        if begin.utcoffset() != timedelta(0):
            raise ValueError(f"start must be in UTC, but is {self.start!r}")
        return self


class Hardware(Frozen):
    """The machines and GPUs of one trial; those of trials side by side are alike."""

    nodes: int = 1
    cpu: str  # the CPU, the cores and the RAM are those of each node
    cpu_cores: int
    ram_gib: float
    # names of the GPUs that a trial may use, on all its nodes, in order
    gpus: tuple[str, ...] = ()
    driver: str | None = None
    gpu_memory_gib: float | None = None  # memory of the smallest GPU


class IdlePower(Frozen):
    """The power of one GPU while nothing runs on it, from its energy counter."""

    gpu: int  # NVML index
    power_w: float  # mean power
    spread_w: float  # standard deviation over windows of a second
    windows: int
    tick_s: float  # time between the counter's updates


class Provenance(Frozen):
    """The facts that a reader needs to judge the figures."""

    hardware: Hardware | None  # None: a replay, whose table doesn't have it
    versions: dict[str, str]
    intensity: Intensity
    # by component (gpu, cpu and ram); one that is not in the figures is absent
    energy_source: dict[str, EnergySource]
    # for cpu and ram, where modelled: how, in words
    models: dict[str, str] = Field(default_factory=dict)
    study_file: str  # the text of the study file

    @property
    def is_replay(self) -> bool:
        """True if energy comes from a table of recorded runs.

        Nothing was trained here then.
        """
        return "recorded" in self.energy_source.values()


class InputFile(Frozen):
    """A file of this machine that trials depend on.

    The study file names it, or a folder that has it.
    """

    path: str  # absolute
    bytes: int
    mtime_ns: int
    # time of the last change of its status, which no copy keeps; None: a study from before it was
    # noted
    ctime_ns: int | None = None
    is_program: bool = False  # True for code, which trials run and never change
    # True if it was written while a trial ran, so that it is not compared
    changed_by_trials: bool = False
    pieces: int = 0  # pieces of 1 MiB, evenly spread, that sha256 is over; 0: the whole file
    sha256: str | None = None  # None: the file has not been read yet


class Wait(Frozen):
    """A wait for cleaner or allowed hours, in which nothing of a trial ran."""

    started_at: Time
    duration_s: Finite
    energy_kwh: Finite  # energy of the idle devices and of the study's processes meanwhile
    # share of the emissions that it was expected to save, as in `PlannedStart`
    expected_saving: float | None

    @property
    def span(self) -> tuple[datetime, datetime]:
        begin = datetime.fromisoformat(self.started_at)
        return begin, begin + timedelta(seconds=self.duration_s)


class PlannedStart(Frozen):
    """The start that a waiting study has planned."""

    at: Time
    finish_by: str  # ISO 8601
    # share of the emissions, against a start when the wait began; negative where the hours that are
    # allowed are dirtier; None: it was not estimated
    expected_saving: float | None
    rule: str  # where the expected intensities come from, in words; empty: only hours are given

    @property
    def effect(self) -> str:
        """The expected effect of the wait, in words that follow the time; empty if unknown."""
        if self.expected_saving is None:
            return ""
        percent = f"{100 * abs(self.expected_saving):.0f} %"
        if self.expected_saving < 0:
            return f": expected to emit {percent} more"
        return f": expected to save {percent}"

    @property
    def local_time(self) -> str:
        """The planned time to the minute, in this machine's time zone."""
        return datetime.fromisoformat(self.at).astimezone().isoformat(sep=" ", timespec="minutes")


class SessionLedger(Frozen):
    """The energy that one worker of a call spent beside its trials, in kWh without PUE."""

    started_at: Time
    worker: str | None = None  # the worker's identity; None: a study from before workers had one
    output_files: tuple[str, ...] = ()  # absolute paths of the files with the command's own output
    # whether it ended while it prepared the study, before the study was stored
    before_study: bool = False
    duration_s: Finite = 0.0
    prepare_kwh: Finite = 0.0
    gap_kwh: Finite = 0.0  # of the phase GAP (see `core.states`)
    # time at its end in which no machine was read, because the connection to one was lost
    unread_s: Finite = 0.0
    # energy of other work on its cores meanwhile, which is not the study's; None: not known
    other_kwh: float | None = None
    # energy of the whole call, by one reading at its begin and one now: checks the sum of the parts
    outer_kwh: float | None = None
    # energy of the nodes during the call, by Slurm's own reading
    slurm_kwh: float | None = None
    # energy of the machine's whole CPU during the call, by CodeCarbon's own model or RAPL
    codecarbon_cpu_kwh: float | None = None
    # share of its machine's CPU and RAM that it counts; None: agents count them, or not known
    machine_share: float | None = None
    # the GPUs' part of prepare, gap and outer; None: no GPU was measured
    prepare_gpu_kwh: float | None = None
    gap_gpu_kwh: float | None = None
    outer_gpu_kwh: float | None = None
    idle: tuple[IdlePower, ...] = ()  # idle power of each GPU, before the call's first trial
    # waits for the hours of the schedule; their energy is part of `gap_kwh`
    waits: tuple[Wait, ...] = ()

    @property
    def span(self) -> tuple[datetime, datetime]:
        """The session's beginning and end, with its waits."""
        begin = datetime.fromisoformat(self.started_at)
        return begin, begin + timedelta(seconds=self.duration_s)

    @property
    def working_spans(self) -> Iterator[tuple[datetime, datetime]]:
        """Yield the spans in which the session did not wait for the hours of the schedule."""
        begin, end = self.span
        for wait in self.waits:
            waits, goes_on = wait.span
            yield begin, max(begin, waits)
            begin = max(begin, goes_on)
        yield begin, max(begin, end)

    @property
    def own_outer_kwh(self) -> float | None:
        """The study's part of `outer_kwh`."""
        return None if self.outer_kwh is None else self.outer_kwh - (self.other_kwh or 0.0)


def wall_clock_s(sessions: Iterable[SessionLedger]) -> float:
    """Return for how many seconds at least one of these sessions worked.

    Time in which several sessions worked at once counts once. Waits for the hours of a schedule
    don't count.
    """
    return union_s(span for session in sessions for span in session.working_spans)


def union_s(spans: Iterable[tuple[datetime, datetime]], until: datetime | None = None) -> float:
    """Return the seconds that at least one of these spans covers.

    Args:
        spans: beginnings and ends, in any order.
        until: time after this moment doesn't count.
    """
    total, reached = timedelta(0), None
    for begin, end in sorted(spans):
        begin, end = (moment if until is None else min(moment, until) for moment in (begin, end))
        reached = begin if reached is None else reached
        total += max(end - max(begin, reached), timedelta(0))
        reached = max(end, reached)
    return total.total_seconds()


def counted_at_once(sessions: Iterable[SessionLedger]) -> dict[str, float]:
    """Return, for each machine, the most times that its CPU and RAM were counted at once.

    Calls that work on the same machine at once may each count them.
    """
    spans: dict[str, list[tuple[float, float, float]]] = {}
    for session in sessions:
        if session.worker is not None and session.machine_share is not None:
            begin_s = datetime.fromisoformat(session.started_at).timestamp()
            # names of workers are made in `storage.workers`
            host = session.worker.rsplit("-", 2)[0]
            spans.setdefault(host, []).append(
                (begin_s, begin_s + session.duration_s, session.machine_share)
            )
    # The most are at work when one of them begins.
    return {
        host: max(
            sum(
                share
                for begin_s, end_s, share in of_host
                if begin_s <= moment_s and end_s - moment_s > _APART_S
            )
            for moment_s, _, _ in of_host
        )
        for host, of_host in spans.items()
    }


class StudyData(Frozen):
    config: StudyConfig
    # the study's identity, which no other study has; None: a study from before studies had one
    id: str | None = None
    records: tuple[TrialRecord, ...]  # all trials in every state, by number
    sessions: tuple[SessionLedger, ...]
    # by their own numbers; a probe is only a few steps, to measure what a step takes
    probes: tuple[TrialRecord, ...] = ()
    provenance: Provenance
    prepared: Prepared | None = None
    trace: CarbonTrace | None = None
    # as the first trial found them; None: a study that didn't note them
    inputs: tuple[InputFile, ...] | None = None
    # the start that the study waits for; None: it does not wait
    planned_start: PlannedStart | None = None
    ended: str | None = None  # why the study ended, in words; None: it has not ended
    ended_by_budget: bool = False  # whether its budget, in trials, time, energy or emissions, did
    # number of `records` when a message last said the study's end; None: none has said it
    end_said_records: int | None = None

    @model_validator(mode="after")
    def _has_possible_batches(self) -> "StudyData":
        """Check the batches of all records here, once, not wherever a report divides them.

        pydantic lets a BadInput pass unchanged.
        """
        for record in self.records:
            try:
                _ = record.params.gradient_accumulation_steps
            except BadInput as error:
                raise BadInput(f"trial {record.trial}: {str(error).removesuffix('.')}") from error
        return self

    def emissions_kg_co2e(self, energy_kwh: float) -> float:
        """Return the emissions of an energy at the study's reference intensity, with PUE."""
        return emissions_kg_co2e(
            energy_kwh, self.provenance.intensity.g_co2e_per_kwh, self.config.carbon.pue
        )

    @property
    def end_is_said(self) -> bool:
        """Whether a message has said the end since the last trial."""
        return self.ended is not None and self.end_said_records == len(self.records)

    @property
    def varied(self) -> tuple[str, ...]:
        """The dimensions that the study varies, without a user's own ones."""
        return tuple(name for name in self.config.search.space.free() if name in DIMENSIONS)

    @property
    def run_counts(self) -> tuple[int, int, int, int]:
        """The numbers of trials, of repeats, of probes and of interrupted attempts.

        Runs count in every state, attempts where a later one followed. `spent_kwh` has the energy
        of them all.
        """
        repeats = sum(record.repeat_of is not None for record in self.records)
        interrupted = sum(run.attempt - 1 for run in (*self.records, *self.probes))
        return len(self.records) - repeats, repeats, len(self.probes), interrupted

    def spent_kwh(self) -> float:
        """Return the energy of the whole study so far in kWh, without PUE.

        It counts all trials and attempts, probes, preparation and gaps, but no other work on the
        same cores.
        """
        sessions_kwh = sum(session.prepare_kwh + session.gap_kwh for session in self.sessions)
        return sum(record.spent_kwh for record in (*self.records, *self.probes)) + sessions_kwh

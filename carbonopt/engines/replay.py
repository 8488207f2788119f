"""Engine that replays trials from a table of recorded runs: the recorded curve and energy, at once.

It serves to compare search strategies, and to run the whole pipeline without a GPU.
"""

import math
from collections.abc import Generator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from carbonopt.core.dimensions import DIMENSION_NAMES, TrialParams
from carbonopt.core.errors import BadInput, shortened
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.events import Evaluated, Event, Exited, Finished, PhaseChanged, Progress
from carbonopt.core.files import parsed_json, read_text
from carbonopt.core.quality import Quality
from carbonopt.core.refusals import first_refusal
from carbonopt.core.trial import Phase, StopReason
from carbonopt.core.units import kwh_from_joules
from carbonopt.core.values import Given, Scalar, Whole
from carbonopt.energy.replay_meter import ReplayMeter
from carbonopt.engines.engine import Engine
from carbonopt.space.search_space import SearchSpace, single_value
from carbonopt.spec.base_settings import Settings
from carbonopt.spec.launch_settings import ReplayLaunch
from carbonopt.spec.space_settings import Fixed, Range
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.trial_spec import TrialSpec

_MAX_MIB = 1024
# Progress reports between two evaluations of a recorded run: a cap is noticed within a tenth of the
# steps between them.
PROGRESS_REPORTS = 10


def _no_negative(nll: float) -> float:
    """Return a mean negative log-likelihood; NaN, unlike for a bound of pydantic's, is allowed."""
    if nll < 0:
        raise ValueError(f"must be 0 or more, or NaN where the run diverged, but is {nll}")
    return nll


class RecordedEval(Settings):
    """One evaluation of a recorded run.

    It has either `nll`, the mean negative log-likelihood over the target tokens in nats, or `mean`
    (sum ÷ count) of another quality with its `count`, which tells the search how certain the mean
    is.
    """

    step: int = Field(ge=1, le=10**12)
    # Infinite or NaN where the run diverged.
    nll: Annotated[float, Field(allow_inf_nan=True), AfterValidator(_no_negative)] | None = None
    mean: Annotated[float, Field(allow_inf_nan=True)] | None = None
    count: int = Field(default=1, ge=1, le=10**18)

    one_of = ("nll", "mean")

    def violations(self) -> dict[str, bool]:
        no_count = self.mean is not None and "count" not in self.model_fields_set
        return {"must have count, of examples, beside mean": no_count}

    @property
    def total(self) -> float:
        """The sum over `count` examples or tokens."""
        mean = self.mean if self.nll is None else self.nll
        assert mean is not None
        return mean * self.count


class RecordedRun(Settings):
    """One recorded run: a line of the table."""

    params: dict[str, Given] = Field(min_length=1)
    seed: Whole = 0
    total_steps: int = Field(ge=1, le=10**12)
    joules_per_step: float = Field(gt=0, le=1e12)
    seconds_per_step: float = Field(gt=0, le=1e9)
    joules_per_eval: float = Field(ge=0, le=1e12)
    evals: tuple[RecordedEval, ...] = Field(min_length=1)


class ReplayEngine(Engine):
    """Engine that replays trials from the table that `launch.table` names."""

    max_power_w = 0.0
    meter: ReplayMeter

    def __init__(self, config: StudyConfig, slot: int = 0) -> None:
        assert isinstance(config.launch, ReplayLaunch)
        self._path = Path(config.launch.table)
        self._space, self._quality = config.search.space, config.quality
        self.description = f"replays {self._path}"
        self.meter = ReplayMeter()

    @cached_property
    def _runs(self) -> list[RecordedRun]:
        return read_table(self._path, self._quality)

    @cached_property
    def _by_params(self) -> dict[tuple[Scalar, ...], list[RecordedRun]]:
        rows: dict[tuple[Scalar, ...], list[RecordedRun]] = {}
        for run in self._runs:
            rows.setdefault(tuple(run.params[key] for key in self._runs[0].params), []).append(run)
        return rows

    def check(self, space: SearchSpace) -> None:
        """Raise BadInput for an unreadable table or a configuration that was not recorded.

        The message for a configuration names the nearest rows.
        """
        recorded = self._runs[0].params
        for name, domain in self._space.domains().items():
            if name not in recorded and not isinstance(domain, Fixed):
                over = f"the table {self._path} was recorded over {', '.join(recorded)} only"
                raise BadInput(f"search.space.{name}: {over}; leave this dimension out.")
            several = isinstance(domain, Range) and single_value(name, domain) is None
            if name in recorded and several:
                raise BadInput(
                    f"search.space.{name}: a replay needs choices, because the table holds single"
                    " points."
                )
        for name in recorded:
            if self._space[name] is None:
                raise BadInput(
                    f"search.space.{name} is missing; the table {self._path} was recorded over it."
                )
        if space.combinations is None:
            why = f"{self._path} holds single points"
            raise BadInput(f"a replay needs choices in every dimension of search.space; {why}.")
        for values in space.combinations:
            self._find(space.params(values), 0)

    def seed(self, seed: int, params: TrialParams) -> int:
        """Return the seed of the run that will be replayed: `seed`, if it was recorded."""
        return self._find(params, seed).seed

    def start(self, spec: TrialSpec, log: Path) -> "ReplayedTrial":
        return ReplayedTrial(self._find(spec.params, spec.seed), self._quality, self.meter)

    def close(self) -> None:
        self.meter.close()

    def _find(self, params: TrialParams, seed: int) -> RecordedRun:
        wanted = {key: getattr(params, key) for key in self._runs[0].params}
        rows = self._by_params.get(tuple(wanted.values())) or [
            run
            for run in self._runs
            if all(_apart(run.params[key], wanted[key]) < 1e-9 for key in wanted)
        ]
        if not rows:
            by_distance = sorted(
                self._runs,
                key=lambda run: math.fsum(_apart(run.params[key], wanted[key]) for key in wanted),
            )
            nearest = "; ".join(_text(run.params) for run in by_distance[:3])
            raise BadInput(
                f"the table {self._path} has no run of {_text(wanted)}; the nearest are: {nearest}."
            )
        return min(rows, key=lambda run: (run.seed != seed, run.seed))


class ReplayedTrial:
    """A running trial whose events come from a recorded run. Implements `RunningTrial`."""

    log = None

    def __init__(self, run: RecordedRun, quality: Quality, meter: ReplayMeter) -> None:
        self._quality, self._meter = quality, meter
        self._stopped, self._events = False, self._play(run)

    def receive(self, timeout_s: float) -> Event | None:
        return next(self._events, Exited(code=0))

    def answer(self, stop: StopReason | None = None) -> None:
        self._stopped = stop is not None

    def runnable_s(self) -> None:
        """Return None, since nothing is trained."""

    def cpu_wait_fraction(self) -> None:
        """Return None, since nothing is trained."""

    def runnable_while_stopped_s(self) -> None:
        """Return None, since nothing is trained."""

    def end(self) -> None:
        self._events.close()

    def log_tail(self, lines: int = 0) -> str:
        return ""

    def _play(self, run: RecordedRun) -> Generator[Event]:
        yield PhaseChanged(phase=Phase.TRAIN)
        done = 0
        for recorded in run.evals:
            start, stretch = done, recorded.step - done
            for part in range(1, PROGRESS_REPORTS + 1):
                step = start + round(stretch * part / PROGRESS_REPORTS)
                energy_kwh = kwh_from_joules((step - done) * run.joules_per_step)
                self._meter.advance(Phase.TRAIN, energy_kwh, (step - done) * run.seconds_per_step)
                done = step
                if part < PROGRESS_REPORTS:
                    yield Progress(step=done, total_steps=run.total_steps)
            yield PhaseChanged(phase=Phase.EVAL)
            self._meter.advance(Phase.EVAL, kwh_from_joules(run.joules_per_eval), 0.0)
            point = EvalPoint.of(
                self._quality, recorded.total, recorded.count, step=recorded.step, tokens=None
            )
            yield Evaluated(point=point, total_steps=run.total_steps)
            if self._stopped:
                return
            yield PhaseChanged(phase=Phase.TRAIN)
        yield Finished(summary={"step": done})


def read_table(path: Path, quality: Quality) -> list[RecordedRun]:
    """Read the recorded runs of a table, for this quality.

    Raises BadInput with the number of a wrong line and what is wrong with it.
    """
    runs: list[RecordedRun] = []
    numbers: dict[tuple[Any, ...], int] = {}  # line numbers by configuration and seed
    # splitlines would end a line within a text, too, at signs that JSON allows there
    lines = read_text(path, "launch.table", _MAX_MIB).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"launch.table: line {number} of {path}"
        try:
            runs.append(RecordedRun.model_validate_json(line, strict=True))
        except ValidationError as error:
            raise BadInput(f"{where}: {first_refusal(error, _known_keys).text}") from error
        try:
            parsed_json(line)  # pydantic takes the last one of equal keys
        except ValueError as error:
            raise BadInput(f"{where}: {error}.") from error
        if problem := _problem(runs[-1], runs[0], quality):
            raise BadInput(f"{where}{problem}.")
        same_as = numbers.setdefault((*sorted(runs[-1].params.items()), runs[-1].seed), number)
        if same_as != number:
            raise BadInput(
                f"{where} has the configuration and the seed of line {same_as}; remove one of them."
            )
    if not runs:
        raise BadInput(f"launch.table: {path} holds no recorded run.")
    return runs


def _known_keys(place: list[Any]) -> list[str]:
    return list((RecordedEval if place else RecordedRun).model_fields)


def _problem(run: RecordedRun, first: RecordedRun, quality: Quality) -> str | None:
    """Return what is wrong with a run, by itself or compared with the table's first run."""
    key = "nll" if quality.value_of_mean == "exp" else "mean"
    for point in run.evals:
        if getattr(point, key) is None:
            return f": evals must have {key}, because the target is {quality.name}"
        if beyond := quality.beyond(quality.value(point.total, point.count)):
            return f": evals must have each {key} of a possible {quality.name}, which {beyond}"
    steps = [point.step for point in run.evals]
    if steps != sorted(set(steps)) or steps[-1] != run.total_steps:
        return (
            f": evals must have rising steps up to total_steps, {run.total_steps}, but have"
            f" {shortened(steps)}"
        )
    if run.params.keys() != first.params.keys():
        return (
            f" has params {', '.join(run.params)}, but the first line has {', '.join(first.params)}"
        )
    if unknown := run.params.keys() - set(DIMENSION_NAMES):
        return f": unknown params {', '.join(sorted(unknown))}"
    return None


def _apart(recorded: Scalar, wanted: Scalar | None) -> float:
    """Return the distance of two values: the absolute log ratio; 1 where that isn't defined."""
    if recorded == wanted:
        return 0.0
    if isinstance(recorded, str | bool) or wanted is None or isinstance(wanted, str | bool):
        return 1.0
    if min(recorded, wanted) <= 0:
        return 1.0
    # Not the logarithm of the ratio, which can be too large or too small for a float.
    return abs(math.log(wanted) - math.log(recorded))


def _text(params: dict[str, Scalar]) -> str:
    return ", ".join(f"{key} {value!r}" for key, value in params.items())

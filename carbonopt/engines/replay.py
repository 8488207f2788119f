"""Trials from a table of recorded runs: the recorded curve and energy, in no time. It is how search strategies are
compared, and how the whole pipeline runs where there is no GPU."""

import json
import math
from collections.abc import Callable, Generator
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from carbonopt.core.config import Choices, Fixed, ReplayLaunch, Space, StudyConfig
from carbonopt.core.dimensions import SEARCHED, TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.events import Evaluated, Event, Exited, Finished, PhaseChanged, Progress
from carbonopt.core.quality import Quality
from carbonopt.core.space import SearchSpace
from carbonopt.core.trial import EvalPoint, Phase, StopReason, TrialSpec
from carbonopt.core.units import kwh_from_joules
from carbonopt.core.values import Frozen, Scalar
from carbonopt.energy.meter import ReplayMeter
from carbonopt.engines.base import EngineObserver
from carbonopt.storage.paths import StudyPaths

# Between two evaluations a recorded run reports so often; a cap is then noticed within that share of the stretch.
PROGRESS_REPORTS = 10

Advance = Callable[[Phase, float, float], None]  # phase, kWh, seconds


class RecordedEval(Frozen):
    """Either the mean negative log-likelihood over the target tokens, in nats, or the mean that another quality is made
    of (its sum ÷ its count)."""

    step: int = Field(ge=1, le=10**12)
    nll: Annotated[float, Field(ge=0)] | None = None
    mean: float | None = None
    count: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _one_mean(self) -> "RecordedEval":
        if (self.nll is None) == (self.mean is None):
            raise ValueError("must have either nll or mean")
        return self

    @property
    def total(self) -> float:
        """Sum over `count`."""
        mean = self.mean if self.nll is None else self.nll
        assert mean is not None
        return mean * self.count


class RecordedRun(Frozen):
    """One line of a table."""

    params: dict[str, bool | int | Annotated[float, Field(allow_inf_nan=False)] | str] = Field(min_length=1)
    seed: int = 0
    total_steps: int = Field(ge=1, le=10**12)
    joules_per_step: float = Field(gt=0, le=1e12)
    seconds_per_step: float = Field(gt=0, le=1e9)
    joules_per_eval: float = Field(ge=0, le=1e12)
    evals: tuple[RecordedEval, ...] = Field(min_length=1)


class ReplayEngine:
    """Trials from the table that `launch.table` names. Implements `Engine`."""

    max_power_w = 0.0
    hardware = None

    def __init__(self, config: StudyConfig) -> None:
        assert isinstance(config.launch, ReplayLaunch)
        self._path = Path(config.launch.table)
        self._space, self._quality = config.search.space, config.target.quality
        self.description = f"replays {self._path}"
        self.meter = ReplayMeter()

    @cached_property
    def _runs(self) -> list[RecordedRun]:
        return read_table(self._path, self._quality)

    @property
    def _keys(self) -> list[str]:
        return list(self._runs[0].params)

    def check(self, space: SearchSpace) -> None:
        """Refuses a table that can't be read, and a space with a configuration that was not recorded, naming the
        nearest rows.

        Raises:
            BadInput
        """
        self._check_space(self._space)
        if space.combinations is None:
            raise BadInput(
                f"a replay needs choices in every dimension of search.space; {self._path} holds single points."
            )
        for values in space.combinations:
            self._find(space.params(values), 0)

    def seed(self, seed: int, params: TrialParams) -> int:
        """The seed of the run that this configuration will be given: the one asked for, where it was recorded."""
        return self._find(params, seed).seed

    def begin(
        self, paths: StudyPaths, fingerprint: str, observer: EngineObserver, interrupted: Callable[[], bool]
    ) -> None:
        pass

    def prepare(self, interrupted: Callable[[], bool]) -> None:
        pass

    def await_free(self, interrupted: Callable[[], bool]) -> None:
        pass

    def start(self, spec: TrialSpec, log: Path) -> "ReplayedTrial":
        return ReplayedTrial(self._find(spec.params, spec.seed), self._quality, self.meter.advance, log)

    def prepare_next(self) -> None:
        pass

    def close(self) -> None:
        self.meter.close()

    def _check_space(self, space: Space) -> None:
        for name, domain in space.domains().items():
            if name not in self._keys and isinstance(domain, Fixed):
                continue
            if name not in self._keys:
                raise BadInput(
                    f"search.space.{name}: the table {self._path} was recorded over {', '.join(self._keys)} only; "
                    "leave this dimension out."
                )
            if not isinstance(domain, Choices | Fixed):
                raise BadInput(f"search.space.{name}: a replay needs choices, because the table holds single points.")
        for name in self._keys:
            if space[name] is None:
                raise BadInput(f"search.space.{name} is missing; the table {self._path} was recorded over it.")

    def _find(self, params: TrialParams, seed: int) -> RecordedRun:
        wanted = {key: getattr(params, key) for key in self._keys}
        rows = [run for run in self._runs if all(_same(run.params[key], wanted[key]) for key in self._keys)]
        if not rows:
            nearest = sorted(self._runs, key=lambda run: _distance(run.params, wanted))[:3]
            shown = "; ".join(_text(run.params) for run in nearest)
            raise BadInput(f"the table {self._path} has no run of {_text(wanted)}; the nearest are: {shown}.")
        return min(rows, key=lambda run: (run.seed != seed, run.seed))


class ReplayedTrial:
    """Speaks as a trial's processes do, from the record."""

    def __init__(self, run: RecordedRun, quality: Quality, advance: Advance, log: Path) -> None:
        self.log = log
        self._quality = quality
        self._advance = advance
        self._stopped = False
        self._events = self._play(run)

    def receive(self, timeout_s: float) -> Event | None:
        return next(self._events, Exited(code=0))

    def answer(self, stop: StopReason | None = None) -> None:
        self._stopped = stop is not None

    def end(self, patience_s: float = 0.0) -> None:
        self._events.close()

    def log_tail(self) -> str:
        return ""

    def _play(self, run: RecordedRun) -> Generator[Event]:
        yield PhaseChanged(phase=Phase.TRAIN)
        done = 0
        for recorded in run.evals:
            start, stretch = done, recorded.step - done
            for part in range(1, PROGRESS_REPORTS + 1):
                step = start + round(stretch * part / PROGRESS_REPORTS)
                self._advance(
                    Phase.TRAIN,
                    kwh_from_joules((step - done) * run.joules_per_step),
                    (step - done) * run.seconds_per_step,
                )
                done = step
                if part < PROGRESS_REPORTS:
                    yield Progress(step=done, total_steps=run.total_steps)
            yield PhaseChanged(phase=Phase.EVAL)
            self._advance(Phase.EVAL, kwh_from_joules(run.joules_per_eval), 0.0)
            point = EvalPoint.of(self._quality, recorded.total, recorded.count, step=recorded.step, tokens=None)
            yield Evaluated(point=point, total_steps=run.total_steps)
            if self._stopped:
                return
            yield PhaseChanged(phase=Phase.TRAIN)
        yield Finished(summary={"step": done})


def read_table(path: Path, quality: Quality) -> list[RecordedRun]:
    """The runs of a table of this quality.

    Raises:
        BadInput: with the line's number and what is wrong with it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its name or its text is not valid"
        raise BadInput(f"launch.table: can't read {path}: {reason}.") from error
    runs: list[RecordedRun] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            run = RecordedRun.model_validate(json.loads(line))
        except (ValidationError, ValueError, RecursionError) as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            what = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}" if first else "it is not a JSON object"
            raise BadInput(f"launch.table: line {number} of {path}: {what}.") from error
        if problem := next(filter(None, (_problem(point, quality) for point in run.evals)), None):
            raise BadInput(f"launch.table: line {number} of {path}: evals {problem}.")
        steps = [point.step for point in run.evals]
        if steps != sorted(set(steps)) or steps[-1] != run.total_steps:
            raise BadInput(
                f"launch.table: line {number} of {path}: evals must have rising steps up to total_steps, "
                f"{run.total_steps}, but end at {steps[-1]}."
            )
        if runs and set(run.params) != set(runs[0].params):
            raise BadInput(
                f"launch.table: line {number} of {path} has params {', '.join(run.params)}, "
                f"but the first line has {', '.join(runs[0].params)}."
            )
        unknown = set(run.params) - set(SEARCHED)
        if unknown:
            raise BadInput(f"launch.table: line {number} of {path}: unknown params {', '.join(sorted(unknown))}.")
        runs.append(run)
    if not runs:
        raise BadInput(f"launch.table: {path} holds no recorded run.")
    return runs


def _problem(point: RecordedEval, quality: Quality) -> str | None:
    key, unwanted = ("nll", point.mean) if quality.value_of_mean == "exp" else ("mean", point.nll)
    if unwanted is not None:
        return f"must have {key}, because the target is {quality.name}"
    beyond = quality.beyond(quality.value(point.total, point.count))
    return f"must have each {key} of a possible {quality.name}, which {beyond}" if beyond else None


def _same(recorded: Scalar, wanted: Scalar | None) -> bool:
    if isinstance(recorded, str | bool) or isinstance(wanted, str | bool) or wanted is None:
        return recorded == wanted
    return math.isclose(recorded, wanted, rel_tol=1e-9)


def _distance(recorded: dict[str, Scalar], wanted: dict[str, Scalar]) -> float:
    """Sum over the dimensions of the ratio (on a logarithm) or, for words, of being different."""
    return math.fsum(_apart(recorded[key], value) for key, value in wanted.items())


def _apart(recorded: Scalar, wanted: Scalar) -> float:
    if isinstance(recorded, str | bool) or isinstance(wanted, str | bool) or min(recorded, wanted) <= 0:
        return float(recorded != wanted)
    return abs(math.log(wanted / recorded))


def _text(params: dict[str, Scalar]) -> str:
    return ", ".join(f"{key} {value}" for key, value in params.items())

"""Tables of recorded runs in list form: random designs, not grids; `foreign.py` says what a line
holds.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field, ValidationError, model_validator

from carbonopt.core.arrays import Array
from carbonopt.core.errors import BadInput
from carbonopt.core.files import read_text
from carbonopt.core.refusals import first_error
from carbonopt.core.values import Frozen, Given
from carbonopt.engines.replay import PROGRESS_REPORTS
from carbonopt.search.cap import exceeds_cap
from carbonopt.search.models.features import check_dimensions, check_values

MOST_MIB = 256
START = 5  # random runs before a rival's model is fitted
_LARGEST = 2**53
Curve = tuple[tuple[int, float], ...]  # step, nll; infinite where it diverged


@dataclass(frozen=True)
class Run:
    """One line of a table."""

    params: dict[str, Any]
    fixed: dict[str, Any]
    total_steps: int
    joules_per_step: float
    curve: Curve

    @property
    def energy_j(self) -> float:
        return self.total_steps * self.joules_per_step

    @property
    def nll(self) -> float:
        return self.curve[-1][1]


@dataclass(frozen=True)
class Trial:
    """What became of a run in a search."""

    run: Run
    spent_j: float
    curve: Curve  # as far as it came
    state: str  # complete, diverged, target, cap, or paused: a part of a run, which may go on

    def feasible_j(self, target_nll: float) -> float:
        """Its energy, where it is complete and meets the target; else infinite."""
        return (
            self.run.energy_j
            if self.state == "complete" and self.run.nll <= target_nll
            else math.inf
        )


class _Eval(Frozen, extra="ignore"):
    step: int = Field(ge=0, le=10**15)
    nll: float | None = Field(
        ge=0, le=700, allow_inf_nan=False
    )  # None: it diverged; beyond, exp(nll) is no number


class _Line(Frozen, extra="ignore"):
    """Of a table; those that carbonopt replays have further keys."""

    seed: int = 0
    params: dict[str, Given] = Field(min_length=1)
    fixed: dict[str, Given] = Field(default_factory=dict)
    total_steps: int = Field(gt=0, le=10**15)
    joules_per_step: float = Field(gt=0, le=1e15, allow_inf_nan=False)
    evals: list[_Eval] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_one_training(self) -> Self:
        steps = [point.step for point in self.evals]
        if any(step <= before for before, step in itertools.pairwise(steps)):
            raise ValueError("evals: the steps must rise")
        if any(point.nll is None for point in self.evals[:-1]):
            raise ValueError("evals: only the last nll may be null, where the run diverged")
        if steps[-1] > self.total_steps:
            raise ValueError(
                f"evals: the last step must be at most {self.total_steps}, total_steps, but is"
                f" {steps[-1]}"
            )
        if both := self.params.keys() & self.fixed.keys():
            raise ValueError(f"{', '.join(sorted(both))} can't be in params and in fixed")
        return self


class Table:
    """Dimensions that have one value in all of it count as fixed. Raises BadInput for anything but
    such a table.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        lines = _read_lines(path)
        constant = [
            name for name in lines[0].params if len({line.params[name] for line in lines}) == 1
        ]
        if len({(_key(line.params), line.seed) for line in lines}) < len(lines):
            raise BadInput(
                f"{path} must have no run twice, but has two or more of the same params and seed."
            )
        lines.sort(
            key=lambda line: -line.seed
        )  # of repeats with other seeds that with the lowest one counts
        self.by_key = {_key(run.params): run for run in (_run(line, constant) for line in lines)}
        self.runs = list(self.by_key.values())
        if len(self.runs) < 2:
            raise BadInput(f"{path} must have two runs or more of different params, but has one.")
        try:
            check_dimensions(self.distributions)
            for run in self.runs:
                check_values(run.fixed)
        except ValueError as error:
            raise BadInput(f"{path}: {error}") from error
        if all(math.isinf(run.nll) for run in self.runs):
            raise BadInput(f"{path}: all runs have diverged; no target can be met.")

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """By the values that each dimension has: words as choices, a range of a hundred and more by
        its logarithm.
        """
        columns = {name: [run.params[name] for run in self.runs] for name in self.runs[0].params}
        return {name: _distribution(values) for name, values in columns.items()}

    def target_nll(self, share: float) -> float:
        """That so many of the runs meet, or all that have not diverged."""
        ends = sorted(run.nll for run in self.runs if math.isfinite(run.nll))
        return ends[min(len(ends), max(1, math.ceil(share * len(self.runs)))) - 1]

    def place(self, values: dict[str, Any]) -> Array:
        """Between 0 and 1 in each dimension; words by one column each."""
        return np.array(
            [
                number
                for name, dist in self.distributions.items()
                for number in _place(dist, values[name])
            ]
        )

    def scaled(self, values: dict[str, Any]) -> dict[str, Any]:
        """Numbers between 0 and 1, as by `place`; words as they are."""
        return {
            name: values[name]
            if isinstance(dist, CategoricalDistribution)
            else float(_place(dist, values[name])[0])
            for name, dist in self.distributions.items()
        }

    def told(self, run: Run, target_nll: float) -> FrozenTrial:
        """A complete run, as one of Optuna's samplers learns of it."""
        trial = optuna.create_trial(
            params=run.params,
            distributions=self.distributions,
            values=[math.log(run.energy_j), run.nll],
        )
        trial.set_constraint("nll above the target", run.nll - target_nll)
        return trial

    def run(self, values: dict[str, Any]) -> Run:
        return self.by_key[_key(values)]

    def fixed(self, values: dict[str, Any]) -> dict[str, Any]:
        """Nothing of a run of another table, which has it among its params."""
        run = self.by_key.get(_key(values))
        return {} if run is None else run.fixed


def _read_lines(path: Path) -> list[_Line]:
    lines: list[_Line] = []
    for number, text in enumerate(read_text(path, "the table", MOST_MIB).splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = _Line.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise BadInput(f"{path}, line {number}: {first_error(error)}") from error
        for what, given in (("params", line.params), ("fixed", line.fixed)):
            first = given if not lines else getattr(lines[0], what)
            if given.keys() != first.keys():
                names = ", ".join(first) or "empty"
                raise BadInput(
                    f"{path}, line {number}: {what} must be {names}, as in the first line."
                )
            if huge := [
                name
                for name, value in given.items()
                if isinstance(value, int) and abs(value) > _LARGEST
            ]:
                raise BadInput(
                    f"{path}, line {number}: {huge[0]} must be at most {_LARGEST}, so that a float"
                    " holds it."
                )
        lines.append(line)
    if not lines:
        raise BadInput(f"{path} must have a line for each run, but has none.")
    return lines


def _run(line: _Line, constant: Sequence[str]) -> Run:
    curve = tuple(
        (point.step, math.inf if point.nll is None else point.nll) for point in line.evals
    )
    params = {name: value for name, value in line.params.items() if name not in constant}
    fixed = line.fixed | {name: line.params[name] for name in constant}
    return Run(params, fixed, line.total_steps, line.joules_per_step, curve)


def _key(values: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(sorted(values.items()))


def _place(distribution: BaseDistribution, value: Any) -> list[float]:
    if isinstance(distribution, CategoricalDistribution):
        return [float(value == choice) for choice in distribution.choices]
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    ends = (distribution.low, distribution.high, value)
    low, high, here = map(math.log, ends) if distribution.log else ends
    return [(here - low) / (high - low) if high > low else 0.0]


def _distribution(values: list[Any]) -> BaseDistribution:
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return CategoricalDistribution(sorted(set(values), key=str))
    low, high = min(values), max(values)
    by_logarithm = low > 0 and high / low >= 100
    if all(isinstance(value, int) for value in values):
        return IntDistribution(low, high, log=by_logarithm)
    return FloatDistribution(float(low), float(high), log=by_logarithm)


Prunes = Callable[[Curve], bool]  # by the curve so far


def never(curve: Curve) -> bool:
    return False


def played(run: Run, cap_j: float, prunes: Prunes) -> Trial:
    """A run as far as a search lets it go."""
    before, seen = 0, []
    for step, nll in run.curve:
        for part in range(1, PROGRESS_REPORTS + 1):
            done = before + round((step - before) * part / PROGRESS_REPORTS)
            if done < run.total_steps and exceeds_cap(
                cap_j if math.isfinite(cap_j) else None,
                done * run.joules_per_step,
                done / run.total_steps,
                run.energy_j,
            ):
                return Trial(run, done * run.joules_per_step, tuple(seen), "cap")
        before = step
        seen.append((step, nll))
        spent_j = step * run.joules_per_step
        if not math.isfinite(nll):
            return Trial(run, spent_j, tuple(seen), "diverged")
        if step < run.total_steps and prunes(tuple(seen)):
            return Trial(run, spent_j, tuple(seen), "target")
    return Trial(run, run.energy_j, tuple(seen), "complete")


def asked(study: optuna.Study, table: Table) -> Iterator[tuple[Run, float, dict[str, Any]]]:
    """Yield each run once, as a sampler of Optuna's asks for them, the seconds of a proposal, and
    the system attributes of the proposed trial.

    A sampler proposes any values; the nearest run that is left stands in for them, and what was
    proposed is told as failed. The run's own trial must have the system attributes: by them NSGA-II
    knows its generations, and without them it draws at random for ever.
    """
    rows = np.array([table.place(run.params) for run in table.runs])
    left = list(range(len(rows)))
    while left:
        began = time.perf_counter()
        proposed = study.ask(table.distributions)
        seconds = time.perf_counter() - began
        index = left.pop(int(((rows[left] - table.place(proposed.params)) ** 2).sum(1).argmin()))
        told = study.tell(proposed, state=TrialState.FAIL)
        yield table.runs[index], seconds, told.system_attrs


Step = tuple[Trial, float]  # a trial, and how many seconds its proposal took
Search = Callable[[Table, float, int], Iterator[Step]]  # by the nll to reach, and the seed

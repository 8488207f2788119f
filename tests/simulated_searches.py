"""Searches over small tables that tests make up: what each configuration costs and reaches is
known, so that whatever a search says of those that it left can be held against them.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import ACCURACY
from carbonopt.core.trial import (
    Durations,
    Energy,
    QualityResult,
    Stage,
    StageCost,
    StopReason,
    TrialRecord,
    TrialState,
)
from carbonopt.search.cap import exceeds_cap
from carbonopt.search.strategy import Strategy
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.study_config import StudyConfig
from carbonopt.study_file.reader import parse_study

EVALUATIONS, EXAMPLES = 4, 1000
TARGET = 0.8
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Training:
    """What a configuration's training takes and reaches."""

    steps: int
    step_kwh: float
    accuracy: float
    excess_kwh: float = 0.0  # of its first step
    fails: bool = False
    planned_steps: int | None = None  # that it announces; None: as many as it makes

    @property
    def cost_kwh(self) -> float:
        return self.steps * self.step_kwh + self.excess_kwh


@dataclass(frozen=True)
class Simulated:
    """A study, of a script or not, whose trainings are `training`'s; `measured` is what a reading makes of a
    trial's true energy.

    `measured` is given a trial's number and its training.
    """

    choices: Mapping[str, list[Any]]
    training: Callable[[Values], Training]
    start: Values | None = None
    measured: Callable[[int, Training], Training] = lambda number, training: training
    trials: int | None = None
    is_script: bool = True

    def run(self, seed: int = 0) -> "Ended":
        """Search until the strategy says that no further trial is worth it, or the trials are used
        up.
        """
        config = self._config(seed)
        space = SearchSpace(config.search.space, 1, on_gpu=False, own_dimensions=True)
        strategy = Strategy(config, space, None)
        study = optuna.create_study(directions=["minimize", "maximize"])
        if self.start is not None:
            study.enqueue_trial(dict(self.start))
        best_kwh: float | None = None
        for number in range(self.trials or len(self.configurations)):
            plan = strategy.plan(study.trials, number)
            if plan.why_ended is not None:
                return Ended(self, study.trials, plan.why_ended)
            study.sampler = plan.sampler
            trial = study.ask(strategy.distributions)
            record = self._record(number, trial.params, space.params(trial.params), best_kwh)
            trial.set_user_attr("record", record.as_json())
            if record.state is TrialState.COMPLETE:
                study.tell(trial, [record.emissions_kg_co2e, record.value])
                if record.value >= TARGET:
                    best_kwh = min(
                        record.energy_kwh.train, math.inf if best_kwh is None else best_kwh
                    )
            else:
                failed = record.state is TrialState.FAILED
                study.tell(
                    trial,
                    state=optuna.trial.TrialState.FAIL
                    if failed
                    else optuna.trial.TrialState.PRUNED,
                )
        return Ended(self, study.trials, strategy.plan(study.trials, len(study.trials)).why_ended)

    @property
    def configurations(self) -> list[dict[str, Any]]:
        return [
            dict(zip(self.choices, values, strict=True))
            for values in itertools.product(*self.choices.values())
        ]

    def _config(self, seed: int) -> StudyConfig:
        command = "python train.py " + " ".join(f"--{name} {{{name}}}" for name in self.choices)
        workload: dict[str, Any] = {"task": "script", "command": command}
        if not self.is_script:
            model = {"from_config": {"model_type": "vit"}}
            dataset = {"builtin": "digits"}
            workload = {"task": "classification", "model": model, "dataset": dataset}
        return parse_study(
            {
                "name": "simulated",
                "workload": workload,
                "target": {"accuracy": TARGET},
                "search": {
                    "space": {name: {"choices": values} for name, values in self.choices.items()},
                    "seed": seed,
                },
                "budget": {"trials": len(self.configurations)},
                "carbon": {"intensity_g_co2e_per_kwh": 1000.0, "pue": 1.0},
                "launch": {"kind": "local", "gpus": []},
            },
            "here",
        )

    def _record(
        self, number: int, values: Values, params: TrialParams, cap_kwh: float | None
    ) -> TrialRecord:
        training = self.measured(number, self.training(values))
        done, stopped = self._done(training, cap_kwh)
        state = (
            TrialState.FAILED
            if training.fails
            else TrialState.PRUNED
            if stopped
            else TrialState.COMPLETE
        )
        points = [training.steps * part // EVALUATIONS for part in range(1, EVALUATIONS + 1)]
        evals = [
            EvalPoint.of(ACCURACY, accuracy * EXAMPLES, EXAMPLES, step=step, tokens=None)
            for step in points
            if step <= done and not training.fails
            for accuracy in [training.accuracy * (1 - 0.3 * (1 - step / training.steps))]
        ]
        train_kwh = done * training.step_kwh + training.excess_kwh
        stages = {
            Stage.COMPILE: StageCost(
                duration_s=1.0, energy_kwh=training.step_kwh + training.excess_kwh
            ),
            Stage.STEPS: StageCost(duration_s=1.0, energy_kwh=(done - 1) * training.step_kwh),
        }
        return TrialRecord(
            trial=number,
            state=state,
            stop_reason=StopReason.CAP if stopped else None,
            seed=0,
            params=params,
            quality=QualityResult(name=ACCURACY.name, value=evals[-1].value if evals else None),
            emissions_kg_co2e=train_kwh,
            energy_kwh=Energy(train=train_kwh, setup=0.0, eval=0.0, total=train_kwh),
            duration_s=Durations(train=1.0, setup=0.0, eval=0.0, total=1.0),
            stages=None if training.fails else stages,
            evals=tuple(evals),
            total_steps=training.steps,
            planned_steps=training.planned_steps if state is TrialState.COMPLETE else None,
            steps_done=0 if training.fails else done,
        )

    def _done(self, training: Training, cap_kwh: float | None) -> tuple[int, bool]:
        """Return the steps that a trial makes, and whether the cap stops it."""
        for percent in range(5, 100, 5):
            step = max(2, training.steps * percent // 100)
            spent_kwh = training.excess_kwh + step * training.step_kwh
            if exceeds_cap(cap_kwh, spent_kwh, step / training.steps, training.cost_kwh):
                return step, True
        return training.steps, False


@dataclass(frozen=True)
class Ended:
    """A search that has ended."""

    simulated: Simulated
    trials: list[optuna.trial.FrozenTrial]
    why: str | None

    @property
    def records(self) -> list[TrialRecord]:
        return [TrialRecord.from_json(trial.user_attrs["record"]) for trial in self.trials]

    @property
    def best(self) -> dict[str, Any]:
        """The configuration that would be recommended, by the measured energy."""
        met = [
            trial for trial in self.trials if trial.values is not None and trial.values[1] >= TARGET
        ]
        return min(met, key=lambda trial: trial.values[0]).params

    def left(self) -> list[dict[str, Any]]:
        """The configurations that were not tried."""
        tried = [trial.params for trial in self.trials]
        return [values for values in self.simulated.configurations if values not in tried]

    def cheaper_left(self, by: float) -> list[dict[str, Any]]:
        """The untried configurations that meet the target for less than (1 - by) of what the
        recommended one takes.
        """
        limit_kwh = (1 - by) * self.simulated.training(self.best).cost_kwh
        trainings = [(values, self.simulated.training(values)) for values in self.left()]
        return [
            values
            for values, training in trainings
            if not training.fails and training.accuracy >= TARGET and training.cost_kwh < limit_kwh
        ]


def random_table(rng: np.random.Generator) -> Simulated:
    """A table of up to 48 configurations whose laws are drawn: dimensions that change a step's cost
    tenfold up or down, or not at all; steps that follow batch and epochs, or don't; a first step's
    excess that all have, some, or the first trial alone; readings that scatter by 3 to 5 %.
    """
    every = {
        "width": [64, 256, 1024],
        "kind": ["a", "b", "c"],
        "depth": [1, 2, 3, 4],
        "global_batch_size": [16, 32, 64],
        "epochs": [1, 2, 4],
        "learning_rate": [1e-3, 3e-3],
        "compiled": [True, False],
    }
    names = [str(name) for name in rng.permutation(list(every))[: rng.integers(1, 4)]]
    choices = {name: every[name] for name in names}
    effects = {
        name: np.log(10) * rng.uniform(-1, 1, len(values)) for name, values in choices.items()
    }
    for name, steepest in (("width", 1.2), ("depth", 1.7)):
        if name in choices:
            powers = rng.uniform(-steepest, steepest) * np.log(
                np.array(choices[name]) / choices[name][0]
            )
            effects[name] = powers + 0.2 * rng.standard_normal(len(choices[name]))
    if "global_batch_size" in choices:
        effects["global_batch_size"] = rng.uniform(0.3, 1.0) * np.log(
            np.array(choices["global_batch_size"]) / 16
        )
    for name in ("learning_rate", "epochs"):
        if name in choices:
            effects[name] = np.zeros(len(choices[name]))
    qualities = {name: 0.1 * rng.standard_normal(len(values)) for name, values in choices.items()}
    follows_law, noise = bool(rng.random() < 0.7), rng.uniform(0.03, 0.05)
    excess_steps = float(rng.choice([0.0, 10.0, 100.0, 1000.0]))
    first_only = bool(rng.random() < 0.3)

    def place(name: str, values: Values) -> int:
        return choices[name].index(values[name])

    def training(values: Values) -> Training:
        epochs, batch = values.get("epochs", 1), values.get("global_batch_size", 16)
        steps = int(3200 * epochs / batch) if follows_law else 200
        step_kwh = 1e-6 * math.exp(sum(effects[name][place(name, values)] for name in choices))
        own = values.get("compiled", True) and not first_only
        accuracy = 0.8 + sum(qualities[name][place(name, values)] for name in choices)
        return Training(
            steps, step_kwh, min(0.99, max(0.2, accuracy)), 1e-6 * excess_steps if own else 0.0
        )

    draws = rng.standard_normal(1000)

    def measured(number: int, true: Training) -> Training:
        step_kwh = true.step_kwh * math.exp(noise * draws[number])
        excess_kwh = true.excess_kwh * math.exp(noise * draws[-number - 1])
        if first_only and number == 0:
            excess_kwh += 1e-6 * excess_steps
        return Training(true.steps, step_kwh, true.accuracy, excess_kwh)

    simulated = Simulated(choices, training, measured=measured)
    every_one = simulated.configurations
    return Simulated(choices, training, every_one[int(rng.integers(len(every_one)))], measured)

"""Studies of many trials: what the models are fitted to is bounded, and small studies lose none."""

import itertools
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from small_studies import many

import carbonopt.search.models.curves as curves
import carbonopt.search.planner as planner
from carbonopt.core.quality import PERPLEXITY
from carbonopt.search.hypervolume import nearest_front
from carbonopt.search.knowledge import Knowledge
from carbonopt.search.models.subset import MOST_FITTED, covering, spread_out
from carbonopt.search.observation import of_record
from carbonopt.search.sampler import CarbonSampler

SPACE = {
    "global_batch_size": CategoricalDistribution([16, 32, 64]),
    "learning_rate": FloatDistribution(1e-4, 1e-2, log=True),
    "epochs": CategoricalDistribution([1, 2, 4]),
}


def knowledge(count: int) -> Knowledge:
    observations = [of_record(record) for record in many(count).records]
    return Knowledge(PERPLEXITY, SPACE, observations, memory_gib=80.0, effort=1)


def test_up_to_500_trials_are_all_fitted() -> None:
    known = knowledge(MOST_FITTED)
    assert known.fitted == known.observations
    assert len(known.curves.points.losses) == sum(bool(t.curve) for t in known.observations)


def test_of_2000_trials_500_are_fitted_among_them_the_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    cholesky = curves.cholesky
    monkeypatch.setattr(
        curves, "cholesky", lambda a, **how: sizes.append(len(a)) or cholesky(a, **how)
    )
    known = knowledge(2000)
    assert len(known.curves.points.losses) == len(known.fitted) == MOST_FITTED
    assert max(sizes) == MOST_FITTED
    fitted = {trial.number for trial in known.fitted}
    front = {known.ends[index][0].number for index in nearest_front(known.end_points, 20)}
    assert front <= fitted
    assert known.step_costs.known == 3  # one for each batch, from all trials
    assert known.calibration > 0
    rows = known.encoder.curve_rows([trial.params for trial in known.observations[:50]])
    assert ((chances := known.chances_to_learn(rows)) > 0).all() and (chances <= 1).all()


def test_a_finished_trial_is_observed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not that of another study, and a running one each time."""
    observed: list[int] = []
    observe = planner.observe

    def counted(trial: Any, *what: Any) -> Any:
        observed.append(trial.number)
        return observe(trial, *what)

    monkeypatch.setattr(planner, "observe", counted)
    sampler = CarbonSampler("perplexity", 5.8, search_space=SPACE)
    for _ in range(2):
        study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
        for number in range(4):
            trial = study.ask(SPACE)
            study.tell(trial, [1.0 + number, 6.0 + number])
        study.ask(SPACE)
        study.ask(SPACE)
    per_study = [*range(4), 4]  # the first trial asked for twice is running then
    assert sorted(observed) == sorted(per_study * 2)


def test_spread_out_rows_leave_none_farther_than_the_chosen_are_apart() -> None:
    """Farthest-point traversal: every other row lies within the least distance of the chosen."""
    rows = np.random.default_rng(0).random((400, 3)) * [1.0, 100.0, 0.0]
    chosen = spread_out(rows, 40, first=[7, 3])
    assert len(set(chosen.tolist())) == 40 and {3, 7} <= set(chosen.tolist())
    places = rows[:, :2] / np.ptp(rows[:, :2], axis=0)
    picked = places[[index for index in chosen.tolist() if index not in (3, 7)]]
    least = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(picked, 2))
    apart = np.linalg.norm(places[:, None] - places[chosen][None], axis=2).min(1)
    assert apart.max() <= least
    assert spread_out(np.ones((30, 2)), 10).tolist() == list(range(10))  # all alike


def test_covering_keeps_all_trials_of_the_settings_that_it_keeps() -> None:
    few = np.repeat(np.arange(10.0), 200)[:, None]
    assert covering(few).all()
    many_settings = np.repeat(np.arange(1000.0), 2)[:, None]
    kept = covering(many_settings, first=[14, 15, 1998])
    assert kept.sum() == 2 * MOST_FITTED
    assert (kept[::2] == kept[1::2]).all() and kept[14] and kept[1998]


def test_layers_of_the_front_are_those_of_brute_force() -> None:
    points = np.random.default_rng(1).integers(0, 12, (60, 2)).astype(float)
    points = np.unique(points, axis=0)
    left, layers = set(range(len(points))), []
    while left:
        layer = [
            index
            for index in left
            if not any((points[other] <= points[index]).all() for other in left if other != index)
        ]
        layers.append(sorted(layer, key=lambda index: points[index, 0]))
        left -= set(layer)
    expected = [index for layer in layers for index in layer]
    assert nearest_front(points, 1000) == expected
    assert nearest_front(points, 7) == expected[:7]

"""Trainings that come to nothing: which ones they are, what is learned from them, and when a
running one is stopped.
"""

import dataclasses
import math
from dataclasses import replace

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from search.test_proposal import EVERY, SPACE, nll, ran

from carbonopt.core.evaluations import breakdown
from carbonopt.core.quality import ACCURACY, PERPLEXITY
from carbonopt.search.knowledge import Knowledge
from carbonopt.search.models.collapse import chance_to_learn, highest_end
from carbonopt.search.models.curves import CORE, CurveModel, Link
from carbonopt.search.observation import CURVE, TOTAL_STEPS, Observation
from carbonopt.search.pruning import LIKELY, forecast_of_miss, largest_fall, lowest_errors
from carbonopt.search.sampler import CarbonSampler

LOW = {"global_batch_size": 32, "learning_rate": 1e-3, "epochs": 2, "micro_batch_size_per_gpu": 8}


@pytest.mark.parametrize(
    ("ends", "highest"),
    [
        ([], math.inf),
        ([0.3], 0.3),
        ([0.0, 0.5, 1.1, 1.7], 1.7),  # as far as it goes, no gap is wider than a factor of two
        ([0.1, 0.0, 2.0, 2.1], 0.1),
        ([0.0, 0.6, 1.25, 2.4, 2.5], 2.5),  # 1.15 is a gap no wider than the range below it
        ([0.0, 0.6, 1.25, 2.6], 1.25),
    ],
)
def test_what_lies_beyond_a_wide_gap_has_collapsed(ends: list[float], highest: float) -> None:
    assert highest_end(ends) == highest


@pytest.mark.parametrize(
    ("losses", "place"),
    [
        ([], None),
        ([2.4], None),
        ([2.36, 1.95, 3.03, 2.96], 2),
        ([5.3, 3.4, 4.3, 5.8, 6.9], 3),
        ([-1.0, -2.0, -0.9], 2),
        ([2.0, 1.0, 3.0, 1.5], None),  # a spike that has passed
        ([3.0, 4.0, 5.0], None),  # it never learned
        ([4.5, 4.1, 4.2, 4.4, 4.6], None),  # overfitting takes it back slowly
        ([2.4, 2.0, math.nan], None),  # it diverged
        ([0.020, 0.017, 0.021, 0.022], None),  # errors of 1,000 evaluation examples
        ([0.0, -0.01, 0.001], None),  # a reward that hardly changes
    ],
)
def test_a_breakdown_takes_back_at_once_all_that_was_learned(
    losses: list[float], place: int | None
) -> None:
    assert breakdown(losses) == place


def test_a_training_that_broke_down_does_not_blur_the_model_of_its_neighbours() -> None:
    known = [ran(number, values) for number, values in enumerate(EVERY[::40])]
    values = known[-1].params | {"learning_rate": known[-1].params["learning_rate"] * 1.1}
    well = [(share, loss) for share, loss in ran(99, values).curve if share <= 0.5]
    last = well[0][1] * 1.4
    broken = ran(99, values, curve=(*well[:-1], (0.5, last)), complete=False)
    assert broken.broke_down_at == len(well) - 1
    with_well, with_broken, alone = (
        Knowledge(PERPLEXITY, SPACE, [*known, *further])
        for further in ([replace(broken, curve=tuple(well[:-1]))], [broken], [])
    )
    assert not with_well.collapsed(with_well.observations[-1])
    assert with_broken.collapsed(broken)
    assert with_broken.curves.noise == pytest.approx(with_well.curves.noise, rel=0.05)
    rows = with_broken.encoder.curve_rows([values])
    assert with_broken.chances_to_learn(rows) < alone.chances_to_learn(rows) == 1.0


def test_rates_near_those_that_collapsed_are_less_likely_to_learn() -> None:
    rates = np.log([1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2])
    known = np.zeros((6, CORE))
    known[:, 1] = rates
    chances = chance_to_learn(known, known, rates < math.log(5e-3))
    assert (np.diff(chances[1:]) < 0).all()
    assert chances[:2].min() > 0.75 and chances[-2:].max() < 0.4
    assert chance_to_learn(known, known, rates < 0).tolist() == [1.0] * 6, "none has collapsed"
    assert chance_to_learn(known, known, rates > 0).tolist() == [1.0] * 6, (
        "nothing tells where it is better"
    )


def diverged(number: int, values: dict):
    return ran(number, values, curve=(), cost=None, complete=False, diverged=True)


def test_a_collapsed_training_is_an_end_somewhat_above_the_others_and_its_curve_is_none() -> None:
    known = [
        ran(number, {**LOW, "learning_rate": rate})
        for number, rate in enumerate((3e-4, 1e-3, 3e-3))
    ]
    stuck = ran(3, {**LOW, "learning_rate": 1e-2}, curve=tuple((k / 8, 9.0) for k in range(1, 9)))
    knowledge = Knowledge(
        PERPLEXITY, SPACE, [*known, stuck, diverged(4, {**LOW, "learning_rate": 1e-2})]
    )
    assert [knowledge.collapsed(trial) for trial in knowledge.observations] == [False] * 3 + [
        True
    ] * 2
    worst = max(trial.final_loss for trial in known)
    for trial in knowledge.observations[3:]:
        assert knowledge.as_modelled(trial).curve == ((1.0, pytest.approx(worst * math.exp(0.2))),)
    running = ran(
        5, LOW, curve=((1 / 8, 50.0), (2 / 8, 40.0), (3 / 8, 2.5), (4 / 8, 30.0)), complete=False
    )
    shown = knowledge.as_modelled(running).curve
    assert shown == ((3 / 8, pytest.approx(2.5)), (4 / 8, pytest.approx(worst * math.exp(0.7))))


def test_what_most_trials_have_come_to_is_no_collapse_where_only_their_ends_are_known() -> None:
    rates = (3e-4, 1e-3, 3e-3, 1e-2)

    def collapsed(*errors: float) -> list[bool]:
        told = [
            ran(number, {**LOW, "learning_rate": rate}, curve=((1.0, error),))
            for number, (rate, error) in enumerate(zip(rates, errors, strict=True))
        ]
        knowledge = Knowledge(ACCURACY, SPACE, told)
        return [knowledge.collapsed(trial) for trial in told]

    assert collapsed(0.02, 0.06, 0.11, 0.27) == [False] * 4
    assert collapsed(0.02, 0.03, 0.025, 0.9) == [False] * 3 + [True]


def test_a_complete_trial_that_ended_at_infinity_meets_nothing_and_is_left_out_of_pruning() -> None:
    space = {name: SPACE[name] for name in ("global_batch_size", "learning_rate", "epochs")}

    def told(number: int, rate: float, value: float, curve: list) -> optuna.trial.FrozenTrial:
        trial = optuna.create_trial(
            params={"global_batch_size": 32, "learning_rate": rate, "epochs": 2},
            distributions=space,
            values=[5.0 + number, value],
            user_attrs={CURVE: curve, TOTAL_STEPS: 100},
        )
        trial.number = number
        return trial

    falling = [[step, 3.0 - step / 100] for step in range(10, 101, 10)]
    early, late = [[50, math.inf]], [[50, 2.5], [100, math.inf]]
    trials = [
        told(0, 1e-3, math.exp(2.0), falling),
        told(1, 3e-3, math.inf, early),
        told(2, 3e-3, math.inf, late),
    ]
    sampler = CarbonSampler("perplexity", 20.0, search_space=space)
    knowledge = sampler.knowledge(trials, space)
    assert [trial.number for trial, *_ in knowledge.ends] == [0]
    assert [trial.number for trial in sampler.meeting(knowledge, ())] == [0]
    running = ran(
        3,
        {**LOW, "learning_rate": 1e-3},
        curve=((0.2, 2.9), (0.4, 2.85), (0.6, 2.83)),
        complete=False,
    )
    alone = sampler.knowledge(trials[:1], space)
    assert (
        forecast_of_miss(knowledge, running, 0.5) is not None
        and forecast_of_miss(alone, running, 0.5) is not None
    )


def test_one_collapsed_training_does_not_change_what_is_told_of_the_others() -> None:
    """Its loss is six times that of all others: as a point like theirs it would be most of the
    noise.
    """
    known = [
        ran(number, {**LOW, "learning_rate": rate, "global_batch_size": batch})
        for number, (rate, batch) in enumerate(
            [(3e-4, 16), (1e-3, 32), (3e-3, 64), (3e-4, 64), (1e-3, 16)]
        )
    ]
    collapsed = ran(
        5, {**LOW, "learning_rate": 1e-2}, curve=tuple((k / 8, 15.0) for k in range(1, 9))
    )
    new = {**LOW, "learning_rate": 3e-3, "global_batch_size": 32}
    for observations in (known, [*known, collapsed]):
        knowledge = Knowledge(PERPLEXITY, SPACE, observations)
        mean, spread = knowledge.curves.predict(knowledge.encoder.curve_rows([new]))
        assert math.exp(mean[0]) == pytest.approx(nll(new), rel=0.05)
        assert (with_all := spread[0]) < 0.05
    plain = knowledge.encoder.points(knowledge.observations)
    _, spread = CurveModel(plain, Link(), knowledge.encoder.centre()).predict(
        knowledge.encoder.curve_rows([new])
    )
    assert spread[0] > 2 * with_all, "what it would be"


@pytest.mark.slow
def test_divergence_keeps_the_search_away_from_its_rate() -> None:
    """Above 1e-2 all diverge, and say no more than that."""
    space = {
        "global_batch_size": CategoricalDistribution([16, 32, 64]),
        "learning_rate": FloatDistribution(1e-4, 1.0, log=True),
        "epochs": CategoricalDistribution([1, 2]),
    }
    study = optuna.create_study(
        directions=["minimize"] * 2, sampler=CarbonSampler("perplexity", 9.5, search_space=space)
    )
    for _ in range(14):
        trial = study.ask(space)
        if trial.params["learning_rate"] > 1e-2:
            trial.set_user_attr(CURVE, [[1, math.inf]])
            trial.set_user_attr(TOTAL_STEPS, 100)
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            energy = trial.params["epochs"] * trial.params["global_batch_size"] ** -0.3
            study.tell(trial, [energy, math.exp(nll(trial.params))])
    rates = [trial.params["learning_rate"] for trial in study.trials]
    assert sum(rate > 1e-2 for rate in rates) <= 4, rates


# -------------------------------------------------------------------------------------------------------------
# pruning


def known_trials(count: int) -> list:
    every = [(rate, batch) for batch in (16, 32, 64) for rate in (3e-4, 1e-3, 3e-3)]
    return [
        ran(number, {**LOW, "learning_rate": rate, "global_batch_size": batch})
        for number, (rate, batch) in enumerate(every[:count])
    ]


def test_a_surprise_is_what_the_model_without_those_evaluations_says() -> None:
    knowledge = Knowledge(PERPLEXITY, SPACE, known_trials(6))
    points, model = knowledge.curves.points, knowledge.curves
    hidden = (points.trial == 2) & (points.share > 0.5)
    shown = dataclasses.replace(
        points, **{name: getattr(points, name)[~hidden] for name in vars(points)}
    )
    without = CurveModel.__new__(CurveModel)
    without.__dict__.update(vars(model))
    without.__dict__ |= {
        "points": shown,
        "_rows": model._rows[~hidden],
        "_y": model._y[~hidden],
        "_same": model._same[~hidden][:, ~hidden],
        "_distrust": model._distrust[~hidden],
    }
    without._condition()
    end = points.rows[hidden][-1:]
    mean, spread = without.predict(end, [2])
    error = math.log(points.losses[hidden][-1]) - mean[0]
    assert model.surprise(hidden) == pytest.approx(error / spread[0], rel=1e-6)


def half_way(trial: Observation) -> Observation:
    return dataclasses.replace(trial, curve=trial.curve[:4], complete=False, cost=None)


def test_forecasts_are_believed_as_far_as_complete_trials_have_borne_them_out() -> None:
    hopeless = half_way(ran(9, {**LOW, "learning_rate": 3e-4, "global_batch_size": 64}))
    forecast = forecast_of_miss(Knowledge(PERPLEXITY, SPACE, known_trials(6)), hopeless, 1.5)
    assert (
        forecast.checked_trials == 6
        and LIKELY <= forecast.sds_needed < LIKELY + 1.5 < forecast.sds_short
    )
    assert forecast.step == hopeless.total_steps // 2
    assert forecast.value == pytest.approx(math.exp(nll(hopeless.params)), rel=0.05)
    # A trial whose loss falls by a tenth in its last quarter, as none did before.
    late = ran(6, {**LOW, "learning_rate": 3e-3})
    curve = tuple((share, loss * (1 - 0.4 * max(0.0, share - 0.75))) for share, loss in late.curve)
    surprised = Knowledge(
        PERPLEXITY, SPACE, [*known_trials(6), dataclasses.replace(late, curve=curve)]
    )
    before = Knowledge(PERPLEXITY, SPACE, known_trials(6))
    assert (
        min(lowest_errors(surprised, surprised.observations))
        < min(lowest_errors(before, before.observations)) - 0.5
    )


def test_a_hopeless_trial_is_stopped_once_forecasts_are_believed() -> None:
    hopeless = ran(9, {**LOW, "learning_rate": 3e-4, "global_batch_size": 64}, evaluations=8)
    half = half_way(hopeless)
    target_loss = 0.8 * hopeless.final_loss
    assert forecast_of_miss(Knowledge(PERPLEXITY, SPACE, known_trials(5)), half, target_loss)
    behind = half.curve[-1][1] + 0.01
    worse = [
        dataclasses.replace(trial, curve=(*trial.curve[:4], (1.0, behind)))
        for trial in known_trials(5)
    ]
    assert forecast_of_miss(Knowledge(PERPLEXITY, SPACE, worse), half, target_loss) is None, (
        "none came as far"
    )
    assert (
        forecast_of_miss(
            Knowledge(PERPLEXITY, SPACE, known_trials(5)), half, 1.02 * hopeless.final_loss
        )
        is None
    )
    # One whose loss fell by two fifths after half of its way: as far as this one's would have to.
    late = ran(5, {**LOW, "learning_rate": 3e-3})
    late = dataclasses.replace(late, curve=(*late.curve[:4], (1.0, 0.6 * late.curve[3][1])))
    surprised = Knowledge(PERPLEXITY, SPACE, [*known_trials(5), late])
    assert largest_fall(surprised, [late], 0.5) == pytest.approx(-math.log(0.6))
    assert forecast_of_miss(surprised, half, 0.61 * half.curve[-1][1]) is None
    assert forecast_of_miss(
        Knowledge(PERPLEXITY, SPACE, known_trials(5)), half, 0.61 * half.curve[-1][1]
    )


@pytest.mark.parametrize("evaluations", [8, 40])
@pytest.mark.parametrize("spike", [0.2, 0.4, 0.8])
def test_a_spike_of_the_loss_alone_stops_no_trial(evaluations: int, spike: float) -> None:
    """A trial that ends below the target is judged at an evaluation far above its curve."""
    knowledge = Knowledge(PERPLEXITY, SPACE, known_trials(8))
    good = ran(9, {**LOW, "learning_rate": 3e-3, "epochs": 4}, evaluations=evaluations)
    target_loss = good.final_loss + 0.02
    for place in range(evaluations // 2, evaluations):
        curve = list(good.curve[:place])
        curve[-1] = curve[-1][0], curve[-1][1] + spike
        spiked = dataclasses.replace(good, curve=tuple(curve), complete=False, cost=None)
        assert forecast_of_miss(knowledge, spiked, target_loss) is None
    # A loss that stays above its curve is no spike.
    raised = tuple((share, loss + spike * (share > 0.5)) for share, loss in good.curve[:-1])
    worse = dataclasses.replace(good, curve=raised, complete=False, cost=None)
    assert spike < 0.4 or forecast_of_miss(knowledge, worse, target_loss) is not None

"""The carbon sampler in anybody's Optuna study, without anything else of carbonopt's."""

import itertools
import math
import multiprocessing
import multiprocessing.synchronize
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from carbonopt.core.quality import PERPLEXITY
from carbonopt.search.models.curves import RATE_SHARE
from carbonopt.search.models.features import SpaceEncoder
from carbonopt.search.observation import COST_PER_STEP, CURVE, TOTAL_STEPS, observe
from carbonopt.search.sampler import CLAIM, CarbonSampler, _claim

TARGET = 12.0
FINITE = {
    "global_batch_size": CategoricalDistribution((16, 32)),
    "learning_rate": CategoricalDistribution((3e-4, 1e-3, 3e-3)),
    "epochs": IntDistribution(1, 2),
}
SIZE = 12


def values_of(batch: int, rate: float, epochs: float) -> tuple[float, float]:
    steps = 4096 * epochs / batch
    nll = (
        1.5
        + 6 * (steps * batch / 32) ** -0.35
        + 0.08 * math.log(rate / 1e-3 / math.sqrt(batch / 32)) ** 2
    )
    return steps * batch**0.6, math.exp(nll)


def finite(trial: optuna.Trial) -> tuple[float, float]:
    values = {name: trial._suggest(name, distribution) for name, distribution in FINITE.items()}
    return values_of(values["global_batch_size"], values["learning_rate"], values["epochs"])


def study_with(sampler: CarbonSampler, **settings: object) -> optuna.Study:
    return optuna.create_study(directions=["minimize"] * 2, sampler=sampler, **settings)


def keys(study: optuna.Study) -> list[tuple]:
    return [tuple(trial.params.values()) for trial in study.trials]


def test_values_alone_are_enough_to_find_the_cheapest(tmp_path: Path) -> None:
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "journal")))
    study = study_with(CarbonSampler("perplexity", TARGET), storage=storage)
    study.optimize(finite, n_trials=8)
    assert len(set(keys(study))) == 8, "a configuration was proposed twice"
    every = [
        values_of(*combination)
        for combination in itertools.product((16, 32), (3e-4, 1e-3, 3e-3), (1, 2))
    ]
    cheapest = min(cost for cost, perplexity in every if perplexity <= TARGET)
    assert min(
        trial.values[0] for trial in study.trials if trial.values[1] <= TARGET
    ) == pytest.approx(cheapest)


def errors_of(perplexity: float) -> float:
    """A share of errors, 0.5 at the target."""
    return perplexity / (perplexity + TARGET)


def test_values_alone_are_enough_where_higher_ones_are_better() -> None:
    """Some of the accuracies are perfect, so that no error is left to learn from."""

    def accurate(trial: optuna.Trial) -> tuple[float, float]:
        cost, perplexity = finite(trial)
        errors = errors_of(perplexity)
        return cost, 1.0 if errors < 0.48 else 1 - errors

    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=CarbonSampler("accuracy", 0.5)
    )
    study.optimize(accurate, n_trials=8)
    assert len(set(keys(study))) == 8, "a configuration was proposed twice"
    every = [
        values_of(*combination)
        for combination in itertools.product((16, 32), (3e-4, 1e-3, 3e-3), (1, 2))
    ]
    assert any(errors_of(perplexity) < 0.48 for _, perplexity in every)
    cheapest = min(cost for cost, perplexity in every if perplexity <= TARGET)
    assert min(
        frozen_trial.values[0] for frozen_trial in study.trials if frozen_trial.values[1] >= 0.5
    ) == pytest.approx(cheapest)


def mixed(trial: optuna.Trial) -> tuple[float, float]:
    batch = trial.suggest_int("global_batch_size", 8, 64, log=True)
    rate = trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
    epochs = trial.suggest_float("epochs", 0.5, 2.0, step=0.25)
    trial.suggest_categorical("kernel", ["fast", "slow", None])
    trial.suggest_float("my_dropout", 0.0, 0.5)
    trial.suggest_int("my_width", 1, 1024, log=True)
    trial.suggest_categorical("precision", ["tf32", "int8"])
    cost, perplexity = values_of(batch, rate, epochs)
    return cost * (2.0 if trial.params["kernel"] == "slow" else 1.0), perplexity


@pytest.mark.slow
def test_every_kind_of_dimension_and_names_of_ones_own() -> None:
    study = study_with(CarbonSampler("perplexity", TARGET, seed=1))
    study.optimize(mixed, n_trials=20)
    assert all(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials)
    assert len(set(keys(study))) == 20
    assert min(trial.values[1] for trial in study.trials) <= TARGET


@pytest.mark.slow
def test_the_seed_decides_the_proposals() -> None:
    runs = {}
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        study = study_with(CarbonSampler("perplexity", TARGET, seed=seed))
        study.optimize(mixed, n_trials=5)
        runs[name] = keys(study)
    assert runs["one"] == runs["same"] != runs["other"]


def test_trials_that_failed_or_have_no_finite_values_teach_what_they_can() -> None:
    study = study_with(CarbonSampler("perplexity", TARGET, search_space=FINITE))
    results = iter([math.nan, math.inf, RuntimeError(), None, None, math.inf, None])

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        cost, perplexity = finite(trial)
        trial.set_user_attr(TOTAL_STEPS, 100)
        trial.set_user_attr(COST_PER_STEP, cost / 100)
        trial.set_user_attr(
            CURVE, [[0, 9.0], [50, math.log(perplexity) + 0.5], [60, math.nan], [100, math.inf]]
        )
        result = next(results)
        if isinstance(result, Exception):
            raise result
        if result is None:
            trial.set_user_attr(CURVE, [[0, 9.0], [50, math.log(perplexity) + 0.5]])
            return cost, perplexity
        return cost, result

    study.optimize(objective, n_trials=7, catch=RuntimeError)
    assert len(set(keys(study))) == 7
    states = [frozen_trial.state.name for frozen_trial in study.trials]
    assert states == ["FAIL", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE", "COMPLETE"]


def test_a_cost_that_is_infinite_or_not_above_zero() -> None:
    study = study_with(CarbonSampler("perplexity", TARGET, search_space=FINITE))
    study.optimize(lambda trial: (math.inf, finite(trial)[1]), n_trials=2)
    study.optimize(finite, n_trials=2)
    study.optimize(lambda trial: (0.0, finite(trial)[1]), n_trials=1)
    with pytest.raises(
        ValueError,
        match=r"cost must be above 0 and perplexity at least 1, but trial 4 has 0 and \d",
    ):
        study.optimize(finite, n_trials=1)


@pytest.mark.parametrize("directions", [["minimize"], ["minimize", "maximize"]])
def test_other_objectives_are_refused(directions: list[str]) -> None:
    study = optuna.create_study(directions=directions, sampler=CarbonSampler("perplexity", TARGET))
    with pytest.raises(
        ValueError, match="cost to minimize and perplexity to minimize, but has minimize"
    ):
        study.ask(FINITE)


def test_a_quality_has_its_own_direction_and_bounds() -> None:
    wrong = optuna.create_study(directions=["minimize"] * 2, sampler=CarbonSampler("accuracy", 0.5))
    with pytest.raises(
        ValueError, match="cost to minimize and accuracy to maximize, but has minimize, minimize"
    ):
        wrong.ask(FINITE)
    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=CarbonSampler("accuracy", 0.5)
    )
    study.optimize(lambda trial: (finite(trial)[0], 1.2), n_trials=1)
    with pytest.raises(
        ValueError, match=r"accuracy at least 0 and at most 1, but trial 0 has \S+ and 1\.2"
    ):
        study.ask(FINITE)


def test_a_study_that_goes_on_gets_what_is_untried_and_then_anything() -> None:
    study = study_with(CarbonSampler("perplexity", TARGET, search_space=FINITE))
    study.optimize(finite, n_trials=SIZE + 1)
    assert len(set(keys(study))) == SIZE


def test_queued_trials_have_the_values_they_were_queued_with() -> None:
    study = study_with(CarbonSampler("perplexity", TARGET, search_space=FINITE))
    queued = {"global_batch_size": 32, "learning_rate": 3e-3, "epochs": 2}
    first = study.ask(FINITE)
    study.enqueue_trial(queued)
    assert study.ask(FINITE).params == queued
    assert first.params != queued
    for _ in range(SIZE - 2):
        study.ask(FINITE)
    assert len(set(keys(study))) == SIZE


@pytest.mark.parametrize(
    "listed", [None, [{"global_batch_size": 32, "learning_rate": 3e-3, "epochs": 2}]]
)
def test_what_is_queued_in_part_is_completed_to_what_can_exist(listed: list | None) -> None:
    def valid(values: dict) -> bool:
        return not (values["epochs"] == 2 and values["global_batch_size"] == 16)

    for seed in range(6):
        study = study_with(
            CarbonSampler(
                "perplexity", TARGET, search_space=FINITE, valid=valid, listed=listed, seed=seed
            )
        )
        study.enqueue_trial({"epochs": 2})
        params = study.ask(FINITE).params
        assert (params["epochs"], params["global_batch_size"]) == (2, 32)


def test_a_sampler_of_two_studies_prunes_by_each_ones_own_trials() -> None:
    def told(sampler: CarbonSampler, worse: float) -> tuple[optuna.Study, optuna.Trial]:
        study = study_with(sampler)
        for _ in range(5):
            trial = study.ask(FINITE)
            tell_curve(trial, 8, worse)
            study.tell(
                trial,
                (values_of(*trial.params.values())[0], math.exp(trial.user_attrs[CURVE][-1][1])),
            )
        trial = study.ask(FINITE)
        return study, trial

    shared = CarbonSampler("perplexity", TARGET, search_space=FINITE)
    (bad, other), (good, trial) = told(shared, 4.0), told(shared, 0.0)
    tell_curve(trial, 5, worse=4.0)
    assert shared.should_prune(good, trial), "the last one that was asked"
    own, alone = told(CarbonSampler("perplexity", TARGET, search_space=FINITE), 4.0)
    for asked in (alone, other):
        tell_curve(asked, 5, worse=4.0)
    assert shared.should_prune(bad, other) == own.sampler.should_prune(own, alone)
    with pytest.raises(
        ValueError, match="should_prune needs the trial's own study, but trial 5 is of"
    ):
        shared.should_prune(bad, trial)


def test_what_is_told_to_affect_the_cost_alone_is_in_no_model_of_the_loss() -> None:
    space = {
        **FINITE,
        "watts": FloatDistribution(300, 700),
        "momentum": FloatDistribution(0.8, 1.0),
    }
    widths = {}
    for told in ({}, {"watts": "cost"}, {"watts": "cost", "momentum": "quality"}):
        encoder = CarbonSampler("perplexity", TARGET, affects=told).knowledge([], space).encoder
        values = [
            {
                "global_batch_size": 16,
                "learning_rate": 1e-3,
                "epochs": 1,
                "watts": 500.0,
                "momentum": 0.9,
            }
        ]
        widths[len(told)] = tuple(
            rows(values).shape[1]
            for rows in (encoder.curve_rows, encoder.system_rows, encoder.memory_rows)
        )
    (curve, system, memory), only_cost, both = widths.values()
    assert only_cost == (curve - 1, system, memory)
    assert both == (curve - 1, system - 1, memory - 1)


def test_of_what_is_told_to_affect_the_cost_alone_the_cheapest_is_searched() -> None:
    """At 500 watts a step costs least; what was learned of the loss at one power holds at each."""
    space = {**FINITE, "watts": CategoricalDistribution((300, 400, 500, 600, 700))}
    study = study_with(
        CarbonSampler("perplexity", TARGET, search_space=space, affects={"watts": "cost"})
    )

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        cost, perplexity = finite(trial)
        return (
            cost
            * (1 + abs(trial.suggest_categorical("watts", [300, 400, 500, 600, 700]) - 500) / 500),
            perplexity,
        )

    study.optimize(objective, n_trials=16)
    met = [trial for trial in study.trials if trial.values[1] <= TARGET]
    every = [
        values_of(*combination)
        for combination in itertools.product((16, 32), (3e-4, 1e-3, 3e-3), (1, 2))
    ]
    cheapest = min(cost for cost, perplexity in every if perplexity <= TARGET)
    assert min(trial.values[0] for trial in met) == pytest.approx(cheapest)


def test_what_is_fixed_counts_for_the_trials_that_have_ended() -> None:
    space = {name: FINITE[name] for name in ("global_batch_size", "epochs")}
    fixed = {"learning_rate": 1e-3, "lr_scheduler": "constant"}
    sampler = CarbonSampler(
        "perplexity",
        TARGET,
        search_space=space,
        complete=lambda values: {**values, **fixed},
        seed=1,
    )
    study = study_with(sampler)
    for _ in range(2):
        trial = study.ask(space)
        study.tell(
            trial, values_of(trial.params["global_batch_size"], 1e-3, trial.params["epochs"])
        )
    knowledge = sampler.knowledge(study.trials, space)
    assert all(
        fixed.items() <= observation.params.items() for observation in knowledge.observations
    )
    ends = knowledge.curves.points.rows
    np.testing.assert_array_equal(
        ends, knowledge.encoder.curve_rows([{**t.params, **fixed} for t in study.trials])
    )
    assert set(ends[:, RATE_SHARE]) == {1.0}, "a constant rate has not fallen"


def test_anybodys_study_can_ask_whether_to_prune() -> None:
    sampler = CarbonSampler("perplexity", TARGET, search_space=FINITE)
    study = study_with(sampler)
    for _ in range(5):
        trial = study.ask(FINITE)
        tell_curve(trial, 8)
        study.tell(trial, finite(trial))
    trial = study.ask(FINITE)
    assert not sampler.should_prune(study, trial), "it has told nothing"
    tell_curve(trial, 2, worse=4.0)
    assert not sampler.should_prune(study, trial), "before a third of its way"
    tell_curve(trial, 5, worse=4.0)
    assert sampler.should_prune(study, trial)


def tell_curve(trial: optuna.Trial, eighths: int, worse: float = 0.0) -> None:
    batch, rate, epochs = (
        trial.params[name] for name in ("global_batch_size", "learning_rate", "epochs")
    )
    steps = 4096 * epochs // batch
    losses = [
        math.log(values_of(batch, rate, epochs * eighth / 8)[1]) + worse
        for eighth in range(1, eighths + 1)
    ]
    trial.set_user_attr(TOTAL_STEPS, steps)
    trial.set_user_attr(
        CURVE, [[steps * eighth / 8, loss] for eighth, loss in enumerate(losses, 1)]
    )


# -------------------------------------------------------------------------------------------------------------
# workers


def test_threads_never_run_the_same_configuration() -> None:
    study = study_with(CarbonSampler("perplexity", TARGET, search_space=FINITE))
    study.optimize(finite, n_trials=SIZE, n_jobs=2)
    assert len(set(keys(study))) == SIZE


def work(journal: str, begin: multiprocessing.synchronize.Barrier) -> None:
    storage = JournalStorage(JournalFileBackend(journal))
    study = optuna.load_study(
        study_name="shared",
        storage=storage,
        sampler=CarbonSampler("perplexity", TARGET, search_space=FINITE),
    )
    for _ in range(SIZE // 2):
        begin.wait()  # both plan at the same time, again and again
        study.optimize(finite, n_trials=1)


@pytest.mark.slow
def test_processes_never_run_the_same_configuration(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    study = study_with(
        CarbonSampler("perplexity", TARGET),
        storage=JournalStorage(JournalFileBackend(journal)),
        study_name="shared",
    )
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(2)
    workers = [context.Process(target=work, args=(journal, begin)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(study.trials) == SIZE
    assert len(set(keys(study))) == SIZE


def test_of_two_equal_claims_the_higher_number_withdraws() -> None:
    study = study_with(CarbonSampler("perplexity", TARGET, search_space=FINITE))
    values = {"global_batch_size": 32, "learning_rate": 3e-3, "epochs": 2}
    frozen = {}
    for number in (0, 1):
        study.ask()
        frozen[number] = study.trials[number]
    assert _claim(study, frozen[0], values)
    assert not _claim(study, frozen[1], values), "the lower number has it"
    assert study.trials[1].system_attrs[CLAIM] == {}
    study._storage.set_trial_system_attr(study.trials[0]._trial_id, CLAIM, {})
    assert _claim(study, frozen[1], values)
    assert not _claim(study, frozen[0], values), "the higher one was first, and does not withdraw"


def test_unnamed_dimensions_on_a_log_scale_are_seen_on_it() -> None:
    encoder = SpaceEncoder({"my_width": FloatDistribution(1.0, 100.0, log=True)})
    low, middle, high = (
        encoder.system_rows([{"my_width": width}])[0, 2] for width in (1.0, 10.0, 100.0)
    )
    assert middle == pytest.approx((low + high) / 2)


# ----------------------------------------------------------------------------------------------
# what can't be given


EARLIER = {"curve": [[100, 3.9], [400, 3.5]], "total_steps": 400, "cost_per_step": 1e-5}


def earlier_trial(params: dict, values: list[float] | None = None) -> optuna.trial.FrozenTrial:
    every = {"global_batch_size": 16, "learning_rate": 1e-3, "epochs": 1, **params}
    distributions = {name: CategoricalDistribution([value]) for name, value in every.items()}
    return optuna.create_trial(
        params=every, distributions=distributions, values=values or [1.0, 33.0], user_attrs=EARLIER
    )


def test_a_study_whose_trials_all_diverge_goes_to_lower_rates() -> None:
    study = study_with(CarbonSampler("perplexity", TARGET, search_space=FINITE))
    rates = []
    for _ in range(3):
        trial = study.ask(FINITE)
        rates.append(trial.params["learning_rate"])
        trial.set_user_attr("curve", [[50, math.nan]])
        trial.set_user_attr("total_steps", 100)
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    lowest = min(FINITE["learning_rate"].choices)
    assert rates[0] > lowest and set(rates[1:]) == {lowest}


def test_a_trial_that_ends_at_no_finite_loss_has_diverged() -> None:
    study = study_with(CarbonSampler("perplexity", TARGET, search_space=FINITE))
    trial = study.ask(FINITE)
    study.tell(trial, [1.0, math.inf])
    assert observe(study.trials[0], PERPLEXITY).diverged


@pytest.mark.parametrize(
    "params",
    [
        {"learning_rate": "auto"},
        {"learning_rate": math.nan},
        {"learning_rate": None},
        {"global_batch_size": 0},
        {"global_batch_size": 2.5},
        {"epochs": 0},
        {"warmup_ratio": 5.0},
        {"world_size": 0},
    ],
)
def test_earlier_trials_that_no_study_could_have_are_left_out(params: dict) -> None:
    space = {name: dist for name, dist in FINITE.items() if name not in params}
    sampler = CarbonSampler(
        "perplexity", TARGET, search_space=space, learn_from=[[earlier_trial(params)]]
    )
    study_with(sampler).ask(space)
    (memory,) = sampler.knowledge([], space).earlier_studies
    assert not memory.observations


@pytest.mark.slow
def test_a_narrow_target_of_a_smooth_function_is_met_in_an_endless_space() -> None:
    """By 0.005 % of the space."""
    space = {name: FloatDistribution(0.0, 1.0) for name in "abc"}
    study = study_with(CarbonSampler("perplexity", math.exp(2.0005), search_space=space, seed=0))
    for _ in range(40):
        trial = study.ask(space)
        loss = 2 + sum((value - 0.6) ** 2 for value in trial.params.values())
        study.tell(trial, [1.0, math.exp(loss)])
        if loss <= 2.0005:
            return
    raise AssertionError("no trial met it")


def test_one_reward_far_from_a_million_times_smaller_others_leaves_a_next_trial() -> None:
    space = {
        **FINITE,
        "learning_rate": FloatDistribution(1e-4, 1e-2, log=True),
        "epochs": IntDistribution(1, 4),
    }
    sampler = CarbonSampler("reward", 0.5, search_space=space)
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)
    rng = np.random.default_rng(0)
    for number in range(6):
        trial = study.ask(space)
        curve = [[25 * (part + 1), 1e-6 * rng.normal()] for part in range(4)]
        if number % 4 == 1:
            curve[-1][1] = 1.0
        trial.set_user_attr(CURVE, curve)
        trial.set_user_attr(TOTAL_STEPS, 100)
        study.tell(trial, [10.0 * trial.params["epochs"], curve[-1][1]])
    assert study.ask(space).params.keys() == space.keys()


@pytest.mark.parametrize(("reward", "target"), [(-1e18, 0.0), (-1.0, 1e100), (1e24, 2e24)])
def test_equal_rewards_of_any_size_are_compared_with_any_target(
    reward: float, target: float
) -> None:
    space = {"learning_rate": FloatDistribution(1e-4, 1e-2, log=True)}
    sampler = CarbonSampler("reward", target, search_space=space)
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)
    for number in range(3):
        trial = study.ask(space)
        trial.set_user_attr(TOTAL_STEPS, 100)
        trial.set_user_attr(CURVE, [[25 * part, reward] for part in range(1, 4)])
        assert sampler.should_prune(study, trial) == (number > 0), (
            "the first has nothing to be judged by"
        )
        study.tell(trial, [1.0, reward])


def test_errors_of_earlier_trials_name_their_study_and_place() -> None:
    bad = earlier_trial({})
    bad.user_attrs = {**EARLIER, "total_steps": 10}
    with pytest.raises(ValueError, match=r"learn_from\[1\]\[0\]: trial -1"):
        CarbonSampler("perplexity", TARGET, learn_from=[[earlier_trial({})], [bad]])


def test_what_complete_does_to_its_argument_changes_no_candidate() -> None:
    space = {
        "global_batch_size": CategoricalDistribution([16, 32]),
        "rate": CategoricalDistribution([1e-3, 3e-3]),
    }
    sampler = CarbonSampler(
        "perplexity",
        TARGET,
        search_space=space,
        complete=lambda values: {"learning_rate": values.pop("rate")},
    )
    assert study_with(sampler).ask(space).params.keys() == space.keys()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"advised": ["learning_rate"]}, "advised"),
        ({"advised": {"momentum": 0.9}}, "advised"),
        ({"advised": {"learning_rate": -1e-3}}, "advised"),
        ({"advised": {"global_batch_size": -(10**5000)}}, "advised"),
        ({"affects": ["x"]}, "affects"),
        ({"listed": iter([{}])}, "listed"),
        (
            {"listed": [{"global_batch_size": 16, "learning_rate": 5.0, "epochs": 1}]},
            r"listed\[0\]",
        ),
    ],
)
def test_arguments_that_cannot_be_are_named(arguments: dict, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        CarbonSampler("perplexity", TARGET, search_space=FINITE, **arguments)


@pytest.mark.parametrize("choices", [(1, True, 2), (0, 1, False), (1, 1.0)])
def test_choices_that_are_equal_in_python_are_refused(choices: tuple) -> None:
    space = {**FINITE, "h": CategoricalDistribution(choices)}
    study = study_with(CarbonSampler("perplexity", TARGET, search_space=space))
    with pytest.raises(ValueError, match="h must have choices that differ"):
        study.ask(space)

"""Which configurations there are to choose from, and what the sampler refuses."""

import math

import numpy as np
import optuna
import pytest
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from carbonopt.core.quality import PERPLEXITY
from carbonopt.search.candidates import ENUMERATED, Candidates
from carbonopt.search.models.features import SpaceEncoder
from carbonopt.search.observation import COST_PER_STEP, CURVE, TOTAL_STEPS, observe
from carbonopt.search.sampler import CarbonSampler
from carbonopt.search.strategy import Strategy
from carbonopt.space.search_space import SearchSpace
from carbonopt.study_file.reader import parse_study

RNG = np.random.default_rng(0)
PRIMES = [n for n in range(2, 2000) if all(n % k for k in range(2, math.isqrt(n) + 1))]


def strategy_of(study: dict, space: dict, sampler: str = "carbon") -> Strategy:
    config = parse_study({**study, "search": {"space": space, "sampler": sampler}}, "here")
    return Strategy(
        config, SearchSpace(config.search.space, config.launch.world_size, on_gpu=False), None
    )


def test_a_large_list_of_which_few_can_exist_is_known_to_its_last_one(tiny_study: dict) -> None:
    some = PRIMES[:100]
    space = {
        "global_batch_size": {"choices": some},
        "micro_batch_size_per_gpu": {"choices": some},
        "learning_rate": {"choices": [1e-4, 1e-3]},
        "epochs": 1,
    }
    assert len(some) ** 2 * 2 > ENUMERATED
    strategy = strategy_of(tiny_study, space)
    study = optuna.create_study(directions=["minimize"] * 2)
    for batch in some[:-1]:
        for rate in (1e-4, 1e-3):
            params = {
                "global_batch_size": batch,
                "micro_batch_size_per_gpu": batch,
                "learning_rate": rate,
            }
            state = optuna.trial.TrialState.FAIL
            study.add_trial(
                optuna.trial.create_trial(
                    params=params, distributions=strategy.distributions, state=state
                )
            )
    for number in (len(study.trials), len(study.trials) + 1):
        plan = strategy.plan(study.trials, number)
        assert plan.why_ended is None
        study.sampler = plan.sampler
        trial = study.ask(strategy.distributions)
        assert (
            trial.params["global_batch_size"]
            == trial.params["micro_batch_size_per_gpu"]
            == some[-1]
        )
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    assert (
        strategy.plan(study.trials, len(study.trials)).why_ended
        == "every configuration of the search space has been run"
    )


SCHEDULES = {
    "global_batch_size": 4,
    "learning_rate": {"low": 1e-4, "high": 1e-2},
    "epochs": 1,
    "lr_scheduler": {"choices": ["constant", "linear"]},
    "warmup_ratio": {"low": 0.0, "high": 0.5},
}


def is_of_schedules(configurations: list[dict]) -> bool:
    """Without a warm-up where there is none, and with many where there is one."""
    warmups: dict[str, set[float]] = {"constant": set(), "linear": set()}
    for values in configurations:
        warmups[values["lr_scheduler"]].add(values["warmup_ratio"])
    return warmups["constant"] == {0.0} and len(warmups["linear"]) > 1


def test_of_configurations_that_train_alike_one_is_a_candidate(tiny_study: dict) -> None:
    strategy = strategy_of(tiny_study, SCHEDULES)
    canonical = strategy.space.canonical
    untried = Candidates(strategy.distributions, lambda _: True, canonical=canonical).untried(
        (), (), RNG
    )
    assert is_of_schedules(untried)
    near = Candidates(strategy.distributions, lambda _: True, canonical=canonical).untried(
        (), untried[:4], RNG
    )
    assert len(near) > len(untried) and is_of_schedules(near)


def test_dimensions_with_a_single_choice_count_as_fixed(tiny_study: dict) -> None:
    space = {
        "global_batch_size": {"choices": [8]},
        "learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
        "epochs": {"low": 2, "high": 2},
        "world_size": {"choices": [1]},
        "learning_rate_scaling": {"choices": ["none", "sqrt"]},
    }
    tiny_study["launch"]["cpu_ranks"] = 2
    strategy = strategy_of(tiny_study, space)
    plan, study = strategy.plan([], 0), optuna.create_study(directions=["minimize"] * 2)
    assert plan.why_ended is None
    study.sampler = plan.sampler
    trial = study.ask(strategy.distributions)
    rate = trial.params["learning_rate"]
    single = {"global_batch_size": 8, "epochs": 2, "world_size": 1}
    # On a single rank a scaled rate is the same rate.
    assert trial.params == {**single, "learning_rate": rate, "learning_rate_scaling": "none"}
    assert strategy.space.params({"learning_rate": rate}).value("epochs") == 2


@pytest.mark.parametrize(
    "domain",
    [
        {"choices": [0.3]},
        {"low": 0.3, "high": 0.3},
        {"low": 0.3, "high": 0.3, "log": True},
        {"low": 0.3, "high": 0.3, "step": 0.1},
        {"low": 0.3, "high": 0.4},
        {"low": 0.3, "high": 0.4, "step": 0.1},
        {"low": 0.3, "high": 0.4, "step": 0.4 - 0.3},  # a little more than 0.1
        {"low": 0.8, "high": 0.9, "step": 0.1},
    ],
)
def test_the_space_and_optuna_agree_on_what_has_a_single_value(
    domain: dict, tiny_study: dict
) -> None:
    space = {"global_batch_size": 8, "learning_rate": domain, "epochs": 1}
    strategy = strategy_of(tiny_study, space)
    single = strategy.distributions["learning_rate"].single()
    assert strategy.space.params({}).learning_rate == (0.3 if single else None)


@pytest.mark.parametrize(("scaling", "rates"), [("none", 1), ("sqrt", 2)])
def test_a_rate_that_goes_with_the_ranks_is_a_quality_of_its_own(
    scaling: str, rates: int, tiny_study: dict
) -> None:
    space = {
        "global_batch_size": 8,
        "learning_rate": 1e-3,
        "epochs": 1,
        "world_size": {"choices": [1, 4]},
    }
    tiny_study["launch"]["cpu_ranks"] = 4
    strategy = strategy_of(tiny_study, {**space, "learning_rate_scaling": scaling})
    values = [{"world_size": ranks} for ranks in (1, 4)]
    assert len({strategy.planner._rate(value) for value in values}) == rates
    rows = SpaceEncoder(strategy.movable).curve_rows(
        [{**value, **strategy.planner._complete(value)} for value in values]
    )
    assert len({tuple(row) for row in rows.tolist()}) == rates


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
def test_of_configurations_that_train_alike_one_is_proposed(sampler: str, tiny_study: dict) -> None:
    strategy, study = (
        strategy_of(tiny_study, SCHEDULES, sampler),
        optuna.create_study(directions=["minimize"] * 2),
    )
    for number in range(8):
        study.sampler = strategy.plan(study.trials, number).sampler
        study.tell(study.ask(strategy.distributions), state=optuna.trial.TrialState.FAIL)
    assert is_of_schedules([trial.params for trial in study.trials])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_sparse_ranges_are_searched_until_something_can_exist(seed: int, tiny_study: dict) -> None:
    """One of 30,000 combinations of these two can exist."""
    space = {
        "global_batch_size": {"low": 1, "high": 100_000},
        "micro_batch_size_per_gpu": {"low": 500, "high": 1000},
        "learning_rate": 1e-3,
        "epochs": 1,
    }
    strategy = strategy_of({**tiny_study, "search": {}}, space)
    strategy.planner._seed = seed
    assert strategy.plan([], 0).why_ended is None


@pytest.mark.parametrize(
    "distribution",
    [
        FloatDistribution(1e-300, 1e10, log=True),
        FloatDistribution(5e-324, 1e300, log=True),
        FloatDistribution(-1.7e308, 1.7e308),
        IntDistribution(1, 2**40, log=True),
    ],
)
def test_wide_ranges_are_drawn_from_all_over(distribution: BaseDistribution) -> None:
    drawn = [
        candidate["x"]
        for candidate in Candidates({"x": distribution}, lambda _: True).untried((), (), RNG)
    ]
    assert len(set(drawn)) > 500
    assert distribution.low <= min(drawn) and max(drawn) <= distribution.high


SPACE: dict[str, BaseDistribution] = {
    "learning_rate": FloatDistribution(1e-4, 1e-2, log=True),
    "epochs": CategoricalDistribution((1, 2, 4)),
}


def asked(space: dict[str, BaseDistribution] = SPACE, **settings: object) -> optuna.Study:
    sampler = CarbonSampler("perplexity", 7.0, search_space=space, **settings)
    return optuna.create_study(directions=["minimize"] * 2, sampler=sampler)


def test_what_valid_refuses_is_never_proposed() -> None:
    study = asked({"epochs": SPACE["epochs"]}, valid=lambda values: values["epochs"] < 4)
    epochs = []
    for _ in range(6):  # more trials than configurations
        trial = study.ask(study.sampler._given_space)
        epochs.append(trial.params["epochs"])
        study.tell(trial, [trial.params["epochs"], 9.0 - trial.params["epochs"]])
    assert set(epochs[:2]) == {1, 2} and set(epochs) == {1, 2}
    with pytest.raises(ValueError, match="valid must allow some combination"):
        asked({"epochs": SPACE["epochs"]}, valid=lambda _: False).ask({"epochs": SPACE["epochs"]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (CURVE, "abc"), (CURVE, None), (CURVE, [[25, None]]), (CURVE, [[1, 2, 3]]), (CURVE, [["a", "b"]]),
        (CURVE, [[-1, 2]]), (CURVE, [[math.inf, 2]]),
        (TOTAL_STEPS, 10**400),
        (TOTAL_STEPS, -100), (TOTAL_STEPS, 0), (TOTAL_STEPS, "many"), (TOTAL_STEPS, math.inf), (TOTAL_STEPS, math.nan),
        (COST_PER_STEP, -1), (COST_PER_STEP, 0), (COST_PER_STEP, math.nan), (COST_PER_STEP, "x"),
        ("peak_memory_gib", -2), ("peak_memory_gib", math.nan), ("out_of_memory", "perhaps"),
    ],
)  # fmt: skip
def test_a_user_attribute_that_cannot_be_is_named(name: str, value: object) -> None:
    study = asked(memory_gib=80.0)
    trial = study.ask(SPACE)
    trial.set_user_attr(name, value)
    study.tell(trial, [10.0, 8.0])
    with pytest.raises(
        ValueError, match=f"trial 0: carbonopt's sampler can't use the user attribute {name}, "
    ):
        study.ask(SPACE)


def test_a_curve_that_no_training_has_is_refused() -> None:
    """Percentages, for one, would teach the sampler without a word that a trial is far beyond its
    target.
    """
    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=CarbonSampler(target=0.9, quality="accuracy")
    )
    trial = study.ask(SPACE)
    trial.set_user_attr(TOTAL_STEPS, 10)
    trial.set_user_attr(CURVE, [[1, 0.4], [2, 50.0]])
    study.tell(trial, [10.0, 0.6])
    with pytest.raises(
        ValueError,
        match="trial 0: accuracy in its user attribute curve must be at most 1, but is 50",
    ):
        study.ask(SPACE)


@pytest.mark.parametrize(
    ("steps", "rule"),
    [
        ((5, 11), "be at most its total_steps, 10, but the last is 11"),
        ((5, 5), "rise, but 5 is followed by 5"),
        ((7, 3), "rise, but 7 is followed by 3"),
    ],
)
def test_a_curve_whose_steps_do_not_rise_or_pass_the_last_is_refused(
    steps: tuple[int, int], rule: str
) -> None:
    study = asked()
    trial = study.ask(SPACE)
    trial.set_user_attr(TOTAL_STEPS, 10)
    trial.set_user_attr(CURVE, [[step, 3.0] for step in steps])
    study.tell(trial, [10.0, 8.0])
    with pytest.raises(
        ValueError, match=f"trial 0: the steps of its user attribute curve must {rule}"
    ):
        study.ask(SPACE)


def test_an_attribute_that_only_has_the_name_of_a_record_is_none() -> None:
    study = asked()
    trial = study.ask(SPACE)
    trial.set_user_attr("record", {"trial": 1, "state": "mine", "params": {}})
    study.tell(trial, [10.0, 8.0])
    observation = observe(study.trials[0], PERPLEXITY)
    assert observation is not None and observation.final_loss == pytest.approx(math.log(8.0))
    study.ask(SPACE)


@pytest.mark.parametrize("last", [math.nan, 1e9, 0.1])
def test_a_complete_trials_value_is_its_end_whatever_its_curve_says(last: float) -> None:
    study = asked()
    trial = study.ask(SPACE)
    trial.set_user_attr(TOTAL_STEPS, 100)
    trial.set_user_attr(CURVE, [[50, 3.0], [100, last]])
    study.tell(trial, [10.0, 8.0])
    observation = observe(study.trials[0], PERPLEXITY)
    assert observation is not None
    assert observation.curve == ((0.5, 3.0), (1.0, math.log(8.0)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": 0.5}, "target must be a finite perplexity, at least 1, but got 0.5"),
        ({"target": math.nan}, "target must be a finite perplexity, at least 1, but got nan"),
        ({"target": math.inf}, "target must be a finite perplexity, at least 1, but got inf"),
        (
            {"quality": "accuracy"},
            "target must be a finite accuracy, at least 0 and at most 1, but got 7.0",
        ),
        ({"quality": "loss"}, "quality must be one of perplexity, accuracy, .*, but got 'loss'"),
        ({"goal": "x"}, "goal must be 'recommend' or 'front', but got 'x'"),
        ({"memory_gib": 0}, "memory_gib must be above 0"),
        ({"memory_gib": math.nan}, "memory_gib must be above 0"),
        ({"memory_gib": "80"}, "memory_gib must be above 0"),
        ({"target": "7"}, "target must be a finite perplexity, at least 1, but got '7'"),
        ({"target": 10**400}, "target must be a finite perplexity.*, but got a whole number"),
        ({"memory_gib": 10**5000}, "memory_gib must be above 0"),
        ({"goal": 10**5000}, "goal must be"),
        ({"target": True}, "target must be a finite perplexity, at least 1, but got True"),
        (
            {"seed": -1},
            "seed must be a whole number from 0, or None for another one each time, but got -1",
        ),
        ({"search_space": [1]}, r"search_space must give dimensions by their names, but got \[1\]"),
        (
            {"affects": {"watts": "memory"}},
            "affects must say 'cost' or 'quality' .*, but got 'memory' of watts",
        ),
        (
            {"affects": {"epochs": "cost"}},
            "affects must say 'cost' or 'quality' .*, but got 'cost' of epochs",
        ),
        (
            {"listed": []},
            r"listed must be a list of all combinations that can exist, or None, but is \[\]",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CarbonSampler(**{"quality": "perplexity", "target": 7.0, **settings})


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("learning_rate", FloatDistribution(0.0, 1.0)),
        ("weight_decay", FloatDistribution(-1.0, 1.0)),
        ("lora_rank", IntDistribution(-1, 8)),
        ("learning_rate", CategoricalDistribution((1e-3, None))),
        ("global_batch_size", FloatDistribution(16.0, 64.0)),
        ("epochs", IntDistribution(0, 2)),
        ("warmup_ratio", FloatDistribution(0.0, 2.0)),
        ("mine", CategoricalDistribution((1.0, math.inf))),
        ("mine", FloatDistribution(-1.7e308, 1.7e308)),
        ("learning_rate", FloatDistribution(1e-300, 1e300)),
        ("learning_rate", FloatDistribution(1e-99, 1e-3, log=True)),
        ("global_batch_size", CategoricalDistribution(("16", "32"))),
        ("learning_rate_scaling", CategoricalDistribution(("cubic", "linear"))),
    ],
)
def test_a_dimension_that_can_not_be_is_named_at_the_first_proposal(
    name: str, distribution: BaseDistribution
) -> None:
    with pytest.raises(ValueError, match=f"{name} can't be .*: leave it out of the search space"):
        asked({name: distribution}).ask({name: distribution})


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (
            {"complete": lambda values: None},
            "complete must return what is fixed by its names, but returned None",
        ),
        (
            {"complete": lambda values: {"warmup_ratio": math.nan}},
            "warmup_ratio can't be nan, but complete has given it",
        ),
        (
            {"complete": lambda values: {"world_size": 0}},
            "world_size can't be 0, but complete has given it",
        ),
        (
            {"complete": lambda values: {"weights": [1]}},
            r"weights can't be \[1\], but complete has given it",
        ),
        (
            {"canonical": lambda values: {}},
            "canonical must give a value for each of learning_rate, epochs, but got",
        ),
        (
            {"canonical": lambda values: None},
            "canonical must give a value for each of learning_rate, epochs, but got",
        ),
        (
            {"listed": [{"epochs": 1}]},
            "listed must give a value for each of learning_rate, epochs, but got",
        ),
    ],
)
def test_functions_and_lists_that_give_what_cannot_be_are_named(
    settings: dict, refused: str
) -> None:
    with pytest.raises(ValueError, match=refused):
        asked(**settings).ask(SPACE)


def test_a_dimension_that_is_no_distribution_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"epochs must be one of Optuna's distributions, but is \[1, 2\]"
    ):
        asked({"epochs": [1, 2]}).ask({"epochs": CategoricalDistribution([1, 2])})


def test_a_seed_of_none_differs_each_time() -> None:
    first = {asked(seed=None).ask(SPACE).params["learning_rate"] for _ in range(3)}
    assert len(first) > 1


@pytest.mark.parametrize("sampler", ["carbon", "grid", "random", "tpe", "nsga2", "gp"])
@pytest.mark.parametrize("sizes", [[4], [4, 8]])
def test_a_range_of_one_value_lets_every_sampler_end(
    sampler: str, sizes: list[int], tiny_study: dict
) -> None:
    space = {
        "global_batch_size": {"choices": sizes},
        "learning_rate": {"low": 1e-3, "high": 1e-3, "log": True},
        "epochs": {"low": 1, "high": 1},
    }
    strategy = strategy_of(tiny_study, space, sampler)
    study = optuna.create_study(directions=["minimize"] * 2)
    while (plan := strategy.plan(study.trials, len(study.trials))).why_ended is None:
        study.sampler = plan.sampler
        trial = study.ask(strategy.distributions)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    assert sorted(trial.params["global_batch_size"] for trial in study.trials) == sizes
    assert plan.why_ended == "every configuration of the search space has been run"


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsga2", "gp"])
def test_few_of_very_many_that_can_exist_are_found(sampler: str, tiny_study: dict) -> None:
    space = {
        "global_batch_size": {"low": 1, "high": 150_000},
        "micro_batch_size_per_gpu": 1000,
        "learning_rate": 1e-3,
        "epochs": 1,
    }
    strategy = strategy_of(tiny_study, space, sampler)
    study = optuna.create_study(directions=["minimize"] * 2)
    for number in range(2):
        study.sampler = strategy.plan(study.trials, number).sampler
        trial = study.ask(strategy.distributions)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    sizes = {trial.params["global_batch_size"] for trial in study.trials}
    assert len(sizes) == 2 and not any(size % 1000 for size in sizes)

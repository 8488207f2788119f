"""What a search learns from earlier studies."""

import contextlib
import dataclasses
import itertools
import json
import math
import sqlite3
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from commands import within
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial
from replays import study_over
from search.test_proposal import SPACE, cost, nll, ran, step_cost

from carbonopt.cli.check_text import describe_study
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import PERPLEXITY, REWARD
from carbonopt.search.knowledge import PRIOR_POINTS, Knowledge
from carbonopt.search.models.costs import SettingModel
from carbonopt.search.observation import COST_PER_STEP, CURVE, TOTAL_STEPS, Observation
from carbonopt.search.sampler import CarbonSampler
from carbonopt.study_file.reader import load_study, parse_study
from carbonopt.study_file.study_checks import check, earlier_trials

EVERY = [
    dict(zip(SPACE, values, strict=True))
    for values in itertools.product(*(d.choices for d in SPACE.values()))
]


def half(values: dict, share: float = 1.0) -> float:
    """The loss of a smaller model."""
    return 1.15 * nll(values, share)


def reversed_rates(values: dict, share: float = 1.0) -> float:
    """Of a task that learns best where this one learns worst."""
    rates = SPACE["learning_rate"].choices
    rate = rates[len(rates) - 1 - rates.index(values["learning_rate"])]
    return nll({**values, "learning_rate": rate}, share)


def told_trials(configurations: list[dict], loss=nll, cheaper: float = 1.0) -> list[FrozenTrial]:
    """Complete trials, evaluated eight times each."""
    trials = []
    for values in configurations:
        own = ran(0, values)
        curve = [[own.total_steps * eighth / 8, loss(values, eighth / 8)] for eighth in range(1, 9)]
        attributes = {
            CURVE: curve,
            TOTAL_STEPS: own.total_steps,
            COST_PER_STEP: cheaper * own.cost_per_step,
        }
        told = {"params": values, "distributions": SPACE, "user_attrs": attributes}
        trials.append(
            optuna.create_trial(values=[cheaper * cost(values), math.exp(loss(values))], **told)
        )
    return trials


def spent(seed: int, learn_from: list[list[FrozenTrial]]) -> float:
    """Until the cheapest run that meets the target has been made, whole trials, by its cost."""
    target = sorted(map(nll, EVERY))[len(EVERY) // 10]
    cheapest = min(cost(values) for values in EVERY if nll(values) <= target)
    sampler = CarbonSampler(
        "perplexity", math.exp(target), search_space=SPACE, seed=seed, learn_from=learn_from
    )
    study = optuna.create_study(directions=["minimize"] * 2, sampler=sampler)
    total = 0.0
    for _ in EVERY:
        trial = study.ask(SPACE)
        total += cost(trial.params)
        if nll(trial.params) <= target and cost(trial.params) <= 1.05 * cheapest:
            return total / cheapest
        (told,) = told_trials([dict(trial.params)])
        for name, value in told.user_attrs.items():
            trial.set_user_attr(name, value)
        study.tell(trial, told.values)
    raise AssertionError("the cheapest was never run")


@pytest.mark.slow
def test_a_neighbour_makes_a_search_cheaper_and_what_misleads_hardly_dearer() -> None:
    rng = np.random.default_rng(1)
    tried = [EVERY[index] for index in rng.choice(len(EVERY), 24, replace=False)]
    memories = {
        "none": [],
        "smaller": [told_trials(tried, half, 0.5)],
        "reversed": [told_trials(tried, reversed_rates)],
    }
    medians = {
        name: statistics.median(spent(seed, memory) for seed in range(6))
        for name, memory in memories.items()
    }
    assert medians["smaller"] < 0.6 * medians["none"], medians
    assert medians["reversed"] < 1.3 * medians["none"], medians


def test_an_earlier_study_has_an_offset_and_tells_the_shape() -> None:
    known = [ran(number, values) for number, values in enumerate(EVERY[::9])]
    earlier = [
        dataclasses.replace(
            each, number=-1 - each.number, curve=tuple((at, 2 * loss) for at, loss in each.curve)
        )
        for each in known
    ]
    (own,) = (ran(0, EVERY[4]),)
    rows = Knowledge(PERPLEXITY, SPACE, [own], earlier=[earlier]).encoder.curve_rows(EVERY)
    truth = np.log([nll(values) for values in EVERY])
    errors = {}
    for name, memory in (("with", [earlier]), ("without", [])):
        knowledge = Knowledge(PERPLEXITY, SPACE, [own], earlier=memory)
        mean, _ = knowledge.curves.predict(rows if memory else knowledge.encoder.curve_rows(EVERY))
        errors[name] = float(np.sqrt(np.mean((mean - truth) ** 2)))
    assert errors["with"] < 0.5 * errors["without"], errors


def test_what_foretells_the_first_trial_s_end_worse_than_its_beginning_does_is_left_out() -> None:
    own, *known = [ran(number, values) for number, values in enumerate(EVERY[::9])]
    for loss, learned in (
        (lambda share, loss: 2 * loss, True),
        (lambda share, loss: 5 - 3 * share**4, False),
    ):
        earlier = [
            dataclasses.replace(
                each,
                number=-each.number,
                curve=tuple((at, loss(at, value)) for at, value in each.curve),
            )
            for each in known
        ]
        knowledge = Knowledge(PERPLEXITY, SPACE, [own], earlier=[earlier])
        assert (set(knowledge.curves.points.trial) > {own.number}) is learned


def test_each_earlier_trial_has_its_own_number_whatever_optuna_numbered_it() -> None:
    made = told_trials(EVERY[:4])
    assert {trial.number for trial in made} == {-1}
    sampler = CarbonSampler("perplexity", 20.0, search_space=SPACE, learn_from=[made, made[:2]])
    first, second = sampler.knowledge([], SPACE).earlier
    numbers = [trial.number for trial in (*first, *second)]
    assert len(set(numbers)) == 6 and max(numbers) < 0


def test_an_earlier_study_of_another_scale_leaves_this_one_s() -> None:
    own = [ran(number, values) for number, values in enumerate(EVERY[:12:4])]
    far = [
        dataclasses.replace(
            each, number=-1 - each.number, curve=tuple((at, 100 * loss) for at, loss in each.curve)
        )
        for each in own
    ]
    unit = Knowledge(REWARD, SPACE, own).link.unit
    assert Knowledge(REWARD, SPACE, own, earlier=[far]).link.unit == unit
    assert Knowledge(REWARD, SPACE, [], earlier=[far]).link.unit == pytest.approx(100 * unit)
    outlier = dataclasses.replace(own[0], number=3, curve=((1.0, 1e6),))
    assert Knowledge(REWARD, SPACE, [*own, outlier]).link.unit == pytest.approx(unit, rel=0.2)


def test_costs_are_those_of_before_but_for_a_constant_and_what_is_measured() -> None:
    rows = Knowledge(PERPLEXITY, SPACE, []).encoder.system_rows(EVERY)
    costs = np.array([step_cost(values) for values in EVERY])
    before = SettingModel(rows, 7 * costs)
    alone, after = (
        SettingModel(rows[:1], costs[:1]),
        SettingModel(rows[:1], costs[:1], before=before),
    )
    np.testing.assert_allclose(after.predict(rows)[0], np.log(costs), atol=0.02)
    assert abs(alone.predict(rows)[0] - np.log(costs)).max() > 0.2
    assert SettingModel(rows[:0], costs[:0], before=before).predict(rows)[0] == pytest.approx(
        np.log(7 * costs), abs=0.02
    )


def test_what_cannot_be_compared_is_left_out_and_of_much_the_most_telling_is_kept() -> None:
    space = {
        **SPACE,
        "own": FloatDistribution(0.1, 1.0, log=True),
        "kind": CategoricalDistribution([1, 2]),
    }

    def trial(number: int, **values: object) -> Observation:
        return ran(
            number,
            {**EVERY[number % len(EVERY)], "own": 0.5, "kind": 1, **values},
            complete=number % 2 == 0,
        )

    strange = [trial(0, own=0), trial(1, own="big"), trial(2, kind="a"), trial(3, kind=True)]
    knowledge = Knowledge(
        PERPLEXITY, space, [], earlier=[strange, [trial(number) for number in range(300)]]
    )
    none, many = knowledge.earlier_studies
    assert not none.observations
    assert len(many.observations) == PRIOR_POINTS // 2 and all(
        each.complete for each in many.observations
    )
    assert len(knowledge.curves.points.losses) == PRIOR_POINTS // 2


def test_an_earlier_trial_s_own_values_count_whatever_is_fixed_now() -> None:
    space = {"learning_rate": SPACE["learning_rate"]}
    fixed = {"global_batch_size": 64, "epochs": 1}
    sampler = CarbonSampler(
        "perplexity",
        20.0,
        search_space=space,
        complete=lambda values: fixed,
        learn_from=[told_trials(EVERY[:1])],
    )
    (memory,) = sampler.knowledge([], space).earlier_studies
    assert memory.observations[0].params == EVERY[0]


@pytest.fixture
def learning(finished: Path, table: Path) -> dict:
    study = study_over(table)
    study["search"]["learn_from"] = [str(finished)]
    return study


@pytest.mark.parametrize(
    ("learn_from", "rule"),
    [
        (None, r"learn_from must be a list of studies' trials, but is None"),
        ("runs/earlier", r"learn_from must be a list of studies' trials, but is 'runs/earlier'"),
        (
            ["runs/earlier"],
            r"learn_from\[0\] must be an earlier study's trials, but is 'runs/earlier'",
        ),
        (told_trials(EVERY[:1]), r"learn_from\[0\] must be an earlier study's trials"),
        ([[], [3]], r"learn_from\[1\] must be an earlier study's trials, but is \[3\]"),
    ],
)
def test_what_is_no_earlier_study_is_refused(learn_from: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        CarbonSampler("perplexity", 20.0, learn_from=learn_from)


@pytest.mark.slow
def test_a_study_file_names_what_to_learn_from(learning: dict, write_study, tmp_path: Path) -> None:
    path = write_study({**learning, "name": "second"}, "second.yaml")
    (trials,) = check(load_study(path)).earlier
    assert len(trials) == 12
    assert (
        f"  learns from 12 trials in {learning['search']['learn_from'][0]}\n"
        in within("check", path).stdout
    )
    done = within("run", path, "--out", tmp_path / "second")
    assert done.returncode in (0, 3), done.stderr
    assert f"learns from {learning['search']['learn_from'][0]}\n" in done.stderr
    said = json.loads(within("recommend", tmp_path / "second", "--json").stdout)
    assert [c["numbers"] for c in said["caveats"] if c["key"] == "learned_from"] == [{"studies": 1}]
    alone = {**learning, "search": {**learning["search"], "learn_from": []}}
    assert parse_study(learning, "here").identity() == parse_study(alone, "here").identity()


def test_check_says_how_many_earlier_trials_have_a_place_in_the_space(
    learning: dict, write_study
) -> None:
    checked = check(load_study(write_study(learning)))
    told = {
        "params": {"learning_rate": 0.0},
        "distributions": {"learning_rate": FloatDistribution(0.0, 1.0)},
    }
    strange = optuna.create_trial(values=[1.0, 20.0], **told)
    shown = describe_study(dataclasses.replace(checked, earlier=([*checked.earlier[0], strange],)))
    assert f"  learns from 12 of 13 trials in {learning['search']['learn_from'][0]}\n" in shown


def test_what_cannot_be_learned_from_is_refused(
    learning: dict, write_study, finished: Path, tmp_path: Path
) -> None:
    config = parse_study({**learning, "target": {"accuracy": 0.5}}, "here")
    with pytest.raises(
        BadInput,
        match="judged by accuracy, to maximize, as this study is, but is by perplexity, to minim",
    ):
        earlier_trials(str(finished), config)
    for twice in ([str(finished)] * 2, [str(finished), f"{finished}/"]):
        learning["search"]["learn_from"] = twice
        with pytest.raises(BadInput, match=r"search.learn_from must name each study once, but got"):
            check(load_study(write_study(learning)))
    learning["search"] |= {"learn_from": [str(finished)], "sampler": "random"}
    with pytest.raises(
        BadInput, match=r"search.learn_from goes with search.sampler: carbon, .* but got random"
    ):
        load_study(write_study(learning))
    learning["search"]["sampler"] = "carbon"
    own = within("run", write_study(learning), "--out", finished)
    assert own.returncode == 2
    assert (
        f"search.learn_from must name earlier studies, but {finished} is this one's folder"
        in own.stderr
    )
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "study.db").write_bytes(b"nothing" * 200)
    learning["search"]["learn_from"] = str(damaged)
    with pytest.raises(BadInput, match=f"search.learn_from: {damaged} can't be read: "):
        check(load_study(write_study(learning)))
    with contextlib.closing(sqlite3.connect(finished / "study.db")) as database, database:
        database.execute("DELETE FROM trials")
    learning["search"]["learn_from"] = str(finished)
    with pytest.raises(
        BadInput,
        match=f"search.learn_from: {finished} must have trials, but has none; run it first",
    ):
        check(load_study(write_study(learning)))
    learning["search"]["learn_from"] = "nowhere"
    with pytest.raises(
        BadInput,
        match=f"search.learn_from: {tmp_path}/nowhere must be the folder of a study, but has no",
    ):
        check(load_study(write_study(learning)))

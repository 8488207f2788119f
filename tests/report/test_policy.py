"""Reward and gold reward beside each other: the section, its figure and what is warned of."""

import pytest
from documents import caveats_of, document_of, rows_of, tables_of
from small_studies import HACKED, HONEST, beside, reward_study, rewarded, study, trial

from carbonopt.core.trial import TrialState
from carbonopt.report.document import Figure, Level
from carbonopt.report.sections.policy_section import section
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData

KEYS = {"gold_reward_fell", "gold_ranks_otherwise", "no_gold_reward"}
ALONE = rewarded(0, (0.2, beside(None, 0.5)), (0.9, beside(None, -1e-9)))


def figure_of(data: StudyData) -> Figure | None:
    made = section(StudyView(data))
    assert made is not None
    return next((block for block in made.blocks if isinstance(block, Figure)), None)


def test_table_has_first_best_and_last() -> None:
    table = tables_of(document_of(reward_study(HACKED, HONEST)))["policy"]
    hacked, honest = rows_of(table)
    assert hacked == {
        "Trial": "0",
        "Reward, first": "0.2000",
        "Reward, last": "0.9000",
        "Gold reward, first": "0.3000",
        "Gold reward, best": "0.4500",
        "Gold reward, last": "0.1000",
        "Divergence from the start (nats)": "9",
        "Tokens of a completion": "15.5",
    }
    assert (honest["Gold reward, best"], honest["Divergence from the start (nats)"]) == (
        "0.6000",
        "3",
    )
    assert [row[0].get("strong", False) for row in table["rows"]] == [True, False]
    assert (
        table["note"]
        == "The gold reward fell, and the reward did not, in trial 0. Of 2 complete trials, trial 0"
        " has the best reward, trial 1 the best gold reward. Trial 0 was first evaluated at step"
        " 10 of 30: what came before is not known."
    )


def test_without_a_gold_reward_there_is_one_panel_and_a_note() -> None:
    data = reward_study(ALONE)
    (row,) = rows_of(tables_of(document_of(data))["policy"])
    assert not any(label.startswith("Gold") for label in row)
    figure, both = figure_of(data), figure_of(reward_study(HACKED))
    assert figure is not None and both is not None
    assert "Gold reward" not in figure.svg and both.svg.count(">Gold reward<") == 1
    assert caveats_of(data)["no_gold_reward"].level is Level.NOTE
    assert caveats_of(data).keys() & KEYS == {"no_gold_reward"}


def test_a_recommendation_whose_gold_reward_fell_is_doubtful() -> None:
    caveat = caveats_of(reward_study(HACKED, HONEST))["gold_reward_fell"]
    assert caveat.level is Level.CRITICAL
    rewards = {"reward_then": 0.5, "reward": 0.9, "gold_then": 0.45, "gold": 0.1}
    assert caveat.numbers == {"trial": 0, "step": 20, "prompts": 50, **rewards}
    assert caveat.text.startswith(
        "From step 20 on, trial 0's gold reward fell from 0.4500 to 0.1000 (means over 50 prompts)"
        " while its reward went from 0.5000 to 0.9000:"
    )


def test_another_trial_whose_gold_reward_fell_is_none_of_the_recommendations() -> None:
    dear = HACKED.model_copy(update={"emissions_kg_co2e": 1.0})
    assert caveats_of(reward_study(dear, HONEST)).keys() & KEYS == set()


@pytest.mark.parametrize(
    ("gold", "warned"), [((0.4, 0.3, 0.2, 0.1), True), ((0.1, 0.3, 0.2, 0.4), False)]
)
def test_rewards_that_order_trials_the_other_way_round_are_a_warning(gold, warned) -> None:
    records = [
        rewarded(number, (0.6 + number / 10, beside(each, 1.0))) for number, each in enumerate(gold)
    ]
    caveats = caveats_of(reward_study(*records))
    assert caveats.keys() & KEYS == ({"gold_ranks_otherwise"} if warned else set())
    if warned:
        assert caveats["gold_ranks_otherwise"].numbers == {
            "trials": 4,
            "correlation": pytest.approx(-1),
            "best": 0,
        }
        assert "correlation -1.00 over 4 trials" in caveats["gold_ranks_otherwise"].text


def test_where_one_evaluation_is_known_nothing_is_drawn() -> None:
    assert figure_of(reward_study(rewarded(0, (0.6, beside(0.5, 1.0))))) is None
    assert (
        figure_of(
            reward_study(rewarded(0, (0.2, {"gold_reward": 0.5}), (0.6, {"gold_reward": 0.5})))
        )
        is None
    )


def test_studies_without_either_have_no_section() -> None:
    assert section(StudyView(study(trial(0)))) is None
    assert (
        section(
            StudyView(
                reward_study(HACKED.model_copy(update={"evals": (), "state": TrialState.FAILED}))
            )
        )
        is None
    )

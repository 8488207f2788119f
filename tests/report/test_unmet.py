"""What a study says whose target nobody met, and how often its pruning was wrong."""

import math

import pytest
from documents import caveats_of, numbers_of
from scipy.stats import binomtest
from small_studies import pruned, reward_study, rewarded, study, trial

from carbonopt.analysis.pruning_audit import audit
from carbonopt.analysis.recommend import recommend
from carbonopt.analysis.shortfall import shortfall
from carbonopt.cli.answers import print_recommendation
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import PERPLEXITY, Target, quality_of
from carbonopt.core.trial import Failure, QualityResult, StopReason, TrialRecord, TrialState
from carbonopt.report.document import Level
from carbonopt.report.study_text import budget_text, goal_text, pruning_text, trials_text
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import headline, tiles
from carbonopt.report.writing import write_report
from carbonopt.spec.checkpoint_settings import CheckpointSettings
from carbonopt.spec.search_settings import Budget, Search
from carbonopt.spec.study_data import StudyData

SPACE = {
    "global_batch_size": {"choices": [8, 16, 32]},
    "learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
    "epochs": {"choices": [1, 2, 4]},
}


def missed(*records: TrialRecord, target: float = 4.0, **search) -> StudyData:
    return study(*records, target=target, raw={"search": {"space": SPACE, **search}})


def curve(number: int, *perplexities: float, **params) -> TrialRecord:
    """A complete trial that was evaluated every 10 steps."""
    evals = tuple(
        EvalPoint.of(PERPLEXITY, math.log(value) * 100, 100, step=10 * (index + 1), tokens=None)
        for index, value in enumerate(perplexities)
    )
    params = {"learning_rate": 1e-3, **params}
    return trial(
        number, perplexity=perplexities[-1], evals=evals, total_steps=10 * len(evals), params=params
    )


@pytest.mark.parametrize(
    ("epochs", "perplexities", "key"),
    [
        (4, (6.0, 5.5, 5.0), "more_epochs"),
        (2, (6.0, 5.5, 5.0), "loss_still_fell"),  # 4 are in the space
        (4, (6.0, 5.001, 5.0), "no_more_epochs"),  # flat
        (2, (6.0, 5.001, 5.0), "no_direction"),
        (4, (5.0,), "no_direction"),  # one evaluation has no slope
        (4, (6.0, 3.9, 5.0), "loss_rose"),
    ],
)
def test_more_epochs_only_where_the_most_were_tried_and_the_loss_still_fell(
    epochs, perplexities, key
) -> None:
    caveats = caveats_of(missed(curve(0, *perplexities, epochs=epochs)))
    assert caveats["target_missed"].numbers == {"trial": 0, "worse": pytest.approx(0.25)}
    directions = {"more_epochs", "loss_still_fell", "loss_rose", "no_direction", "no_more_epochs"}
    assert caveats.keys() & directions == {key}
    assert caveats[key].level is Level.CRITICAL


def test_an_evaluation_right_after_another_hides_no_trend() -> None:
    """Every 500 steps, and at the end, a step later."""
    points = ((500, 6.0), (1000, 5.5), (1500, 5.0), (1501, 4.999))
    evals = tuple(
        EvalPoint.of(PERPLEXITY, math.log(value) * 100, 100, step=step, tokens=None)
        for step, value in points
    )
    params = {"learning_rate": 1e-3, "epochs": 4}
    record = trial(0, perplexity=4.999, evals=evals, total_steps=1501, params=params)
    numbers = numbers_of(missed(record), "more_epochs")
    assert numbers["steps"] == 501
    assert numbers["fell"] == pytest.approx(math.log(5.5 / 4.999))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(
    ("losses", "rises", "falls"),
    [((6.0, 5.5, 5.0), False, True), ((6.0, 5.001, 5.0), False, False), ((6, 4, 5), True, False)],
)
def test_a_trend_is_seen_whatever_the_scale_of_a_quality_of_ones_own(
    scale: float, losses: tuple[float, ...], rises: bool, falls: bool
) -> None:
    quality = quality_of("error", "minimize")
    evals = tuple(
        EvalPoint.of(quality, scale * loss, 1, step=10 * place, tokens=None)
        for place, loss in enumerate(losses, start=1)
    )
    of_record = QualityResult(name="error", direction="minimize", value=evals[-1].value)
    record = trial(0, evals=evals, total_steps=30, quality=of_record)
    trend = shortfall(missed(record), 0, scale * 5, Target(quality, scale)).trend
    assert (trend.rises, trend.falls) == (rises, falls)


@pytest.mark.parametrize(
    ("params", "other", "said"),
    [
        ({"epochs": 1}, {"epochs": 2}, {("epochs", "lowest", 1)}),
        ({"epochs": 4}, {"epochs": 2}, set()),  # more of them cost more
        ({"epochs": 2, "learning_rate": 1e-2}, {"epochs": 4}, {("learning_rate", "highest", 1e-2)}),
        # No other batch was tried.
        ({"epochs": 2, "global_batch_size": 8}, {"epochs": 4, "global_batch_size": 8}, set()),
    ],
)
def test_an_answer_at_an_end_of_the_space_says_so(params, other, said) -> None:
    data = missed(
        trial(0, 1e-3, 3.0, params={"learning_rate": 1e-3, "global_batch_size": 16, **params}),
        trial(1, 2e-3, 3.0, params={"learning_rate": 2e-3, "global_batch_size": 16, **other}),
    )
    edges = StudyView(data).edges
    assert {(edge.dimension, edge.end, edge.value) for edge in edges} == said
    assert ("at_space_end" in caveats_of(data)) == bool(said)


def test_what_is_missing_has_its_figures() -> None:
    numbers = numbers_of(missed(curve(0, 6.0, 5.5, 5.0, epochs=4)), "more_epochs")
    assert (numbers["epochs"], numbers["steps"]) == (4, 10)
    assert (numbers["fell"], numbers["missing"]) == pytest.approx(
        (math.log(5.5 / 5), math.log(5 / 4))
    )
    numbers = numbers_of(missed(curve(0, 6.0, 3.9, 5.0, epochs=4)), "loss_rose")
    assert (numbers["best"], numbers["step"]) == (pytest.approx(3.9), 20)


def test_fixed_epochs_can_be_raised_too() -> None:
    data = missed(curve(0, 6.0, 5.5, 5.0))
    data = study(*data.records, target=4.0, raw={"search": {"space": {**SPACE, "epochs": 2}}})
    assert "more_epochs" in caveats_of(data)


@pytest.mark.parametrize(
    ("params", "other", "edge"),
    [
        ({"learning_rate": 1e-2}, {"learning_rate": 1e-3}, ("learning_rate", "highest", 0.01)),
        ({"learning_rate": 1.1e-4}, {}, ("learning_rate", "lowest", 0.00011)),
        ({"global_batch_size": 8}, {"global_batch_size": 16}, ("global_batch_size", "lowest", 8)),
        (
            {"global_batch_size": 32},
            {"global_batch_size": 16},
            ("global_batch_size", "highest", 32),
        ),
        (
            {"global_batch_size": 8},
            {"global_batch_size": 8},
            None,
        ),  # no other was tried: no evidence
        ({"global_batch_size": 16}, {"global_batch_size": 8}, None),
        ({"learning_rate": 5e-3}, {"learning_rate": 1e-3}, None),
    ],
)
def test_an_end_of_the_space_points_beyond_it_if_another_value_was_tried(
    params, other, edge
) -> None:
    caveats = caveats_of(missed(curve(0, 6.0, 5.0, **params), curve(1, 8.0, 7.0, **other)))
    assert ("edge" in caveats) == (edge is not None)
    if edge is not None:
        numbers = caveats["edge"].numbers
        assert (numbers["dimension"], numbers["end"], numbers["value"]) == edge
        assert numbers["wanted"] == {"highest": "higher", "lowest": "lower"}[edge[1]]


def test_nothing_is_missing_where_the_target_is_met() -> None:
    data = missed(curve(0, 6.0, 5.0, epochs=4))
    assert not {"target_missed", "more_epochs", "loss_still_fell"} & caveats_of(data, 5.0).keys()
    assert recommend(data, 5.0).shortfall is None
    assert "shortfall" not in recommend(data, 5.0).as_json()
    answer = recommend(data).as_json()["shortfall"]
    assert answer["missing_loss"] == pytest.approx(math.log(5 / 4))
    assert answer["most_epochs"] == 4


def unfinished(number: int, state: TrialState, text: str = "", **changes) -> TrialRecord:
    failure = Failure(kind="crash", text=text, log="/somewhere/log-1.txt") if text else None
    return trial(number, 1e-5, None, state=state, evals=(), failure=failure, **changes)


def test_no_trial_that_fits_or_ends(capsys) -> None:
    none_fits = missed(*(unfinished(number, TrialState.INFEASIBLE) for number in range(3)))
    assert numbers_of(none_fits, "out_of_memory") == {
        "count": 3,
        "of": 3,
        "advice": (
            "allow smaller values of micro_batch_size_per_gpu or offload or gradient_checkpointing,"
            " or take a shorter workload.sequence_length or a smaller model"
        ),
    }
    assert not print_recommendation(none_fits)
    assert "did not fit in memory" in capsys.readouterr().out
    mixed = missed(
        unfinished(0, TrialState.DIVERGED),
        unfinished(1, TrialState.FAILED, "CUDA error: first\nmore"),
        unfinished(2, TrialState.FAILED, "CUDA error: an illegal access\nmore"),
        unfinished(3, TrialState.TIMEOUT),
        unfinished(4, TrialState.FAILED, stop_reason=StopReason.INTERRUPTED),
    )
    caveats = caveats_of(mixed)
    assert list(caveats)[:3] == ["failed", "diverged", "timeout"]  # the most frequent first
    failed = {"count": 2, "of": 4, "trial": 2, "text": "CUDA error: an illegal access"}
    assert caveats["failed"].numbers == failed and "/somewhere" not in caveats["failed"].text
    stopped = caveats_of(missed(pruned(0), pruned(1)))
    assert stopped["target_missed"].numbers["worse"] == pytest.approx(2.0)
    assert stopped["all_pruned"].numbers == {"count": 2, "of": 2}
    assert not any(caveat.level is Level.CRITICAL for caveat in caveats_of(missed()).values())


def test_the_page_of_a_study_in_which_nothing_fits_says_what_to_change(tmp_path) -> None:
    write_report(missed(unfinished(0, TrialState.INFEASIBLE)), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "none was evaluated" in text and "1 of 1 trial did not fit in memory" in text
    assert "| Ended | all trials done |" in text


# ----------------------------------------------------------------------------------------------------------
# the audit


def checked(number: int, perplexity: float, **changes) -> TrialRecord:
    return trial(number, perplexity=perplexity, audited_at_step=20, **changes)


def test_the_audits_rate_is_that_of_audited_trials_at_their_end() -> None:
    data = missed(
        checked(0, 3.9),
        *(checked(number, 5.0) for number in range(1, 6)),
        checked(6, 5.0, state=TrialState.DIVERGED),
        checked(7, 5.0, state=TrialState.PRUNED, stop_reason=StopReason.BUDGET),
        trial(8, perplexity=3.8),
        pruning={"audit": 0.2},
    )
    audit_result = audit(data)
    assert audit_result is not None
    assert (audit_result.ended, audit_result.mattered, audit_result.cut_short) == (7, 1, 1)
    interval = binomtest(1, 7).proportion_ci(0.95, method="exact")
    assert (audit_result.lowest_rate, audit_result.highest_rate) == pytest.approx(
        (interval.low, interval.high)
    )
    numbers = numbers_of(data, "pruning_audit")
    assert (numbers["ended"], numbers["mattered"], numbers["cut_short"]) == (7, 1, 1)
    assert (numbers["lowest"], numbers["highest"]) == (
        audit_result.lowest_rate,
        audit_result.highest_rate,
    )


@pytest.mark.parametrize("mattered", [0, 3])
def test_the_interval_at_its_ends(mattered: int) -> None:
    data = missed(
        *(checked(number, 3.0 if number < mattered else 5.0) for number in range(3)),
        pruning={"audit": 1},
    )
    audit_result = audit(data)
    interval = binomtest(mattered, 3).proportion_ci(0.95, method="exact")
    assert audit_result is not None
    assert (audit_result.lowest_rate, audit_result.highest_rate) == pytest.approx(
        (interval.low, interval.high)
    )


def test_of_a_search_for_the_front_those_on_it_mattered() -> None:
    records = (
        checked(0, 5.0),
        trial(1, 2e-3, perplexity=4.5),
        checked(2, 9.0, emissions_kg_co2e=1.0),
    )
    data = missed(*records, goal="front", pruning={"audit": 0.5})
    audit_result = audit(data)
    assert audit_result is not None and (audit_result.ended, audit_result.mattered) == (2, 1)
    assert numbers_of(data, "pruning_audit")["did"] == "ended on the Pareto front"


def test_an_audit_is_spoken_of_only_where_one_was_asked_for() -> None:
    assert not {"pruning_audit", "pruning_audit_none"} & caveats_of(missed(trial(0))).keys()
    caveats = caveats_of(missed(trial(0), pruning={"audit": 0.05}))
    assert caveats["pruning_audit_none"].numbers == {"share": 0.05, "cut_short": 0}


# -----------------------------------------------------------------------------------------------
# what a study will do


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        ({"trials": 3}, "after 3 trials"),
        ({"trials": 1, "hours": 1}, "after 1 trial or 1 hour, whichever comes first"),
        ({"trials": 3, "hours": 0.5}, "after 3 trials or 0.5 hours, whichever comes first"),
        (
            {"until": "converged", "reuses": 1},
            (
                "when another trial is expected to cost more energy than it saves in one run of the"
                " recommendation"
            ),
        ),
        (
            {"energy_kwh": 2, "until": "converged"},
            (
                "after 2 kWh or when another trial is expected to cost more energy than it saves in"
                " 10 runs of the recommendation, whichever comes first"
            ),
        ),
    ],
)
def test_when_a_study_ends_in_words(budget: dict, text: str) -> None:
    assert budget_text(Budget(**budget)) == text


def test_what_is_pruned_in_words() -> None:
    def search(**changes) -> Search:
        return missed(**changes).config.search

    assert "is expected to emit more, than the best" in pruning_text(search())
    assert "(5 % of it runs to its end all the same, as an audit)" in pruning_text(
        search(pruning={"audit": 0.05})
    )
    assert pruning_text(search(goal="front")) == "what can't be on the front"  # no cap there
    assert goal_text(search(goal="front")).startswith("front: ")
    assert (
        pruning_text(search(pruning={"target": False, "cap": False}))
        == "nothing: every trial runs to its end"
    )


def test_a_trial_that_stood_at_the_target_and_failed_is_not_said_to_miss_it() -> None:
    seen = curve(0, 6.0, 3.0)
    failed = seen.model_copy(
        update={"state": TrialState.FAILED, "failure": Failure(kind="RuntimeError", text="no")}
    )
    view = StudyView(missed(failed))
    assert (
        headline(view)
        == "No trial met the target and completed; one had perplexity 3.000 when it ended (target: at most 4.000)"
    )
    assert "closest_not_complete" in caveats_of(view.data)
    assert headline(StudyView(missed(curve(0, 6.0, 5.0)))).startswith("No trial reached the target")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((6.0, 3.0, None), "one had perplexity 3.000 before its last evaluation"),
        ((6.0, 5.0, None), "No trial reached the target, perplexity at most 4.000; the best evaluation had 5.000"),
        ((None,), "no evaluation is finite"),
        ((), "none was evaluated"),
    ],
)  # fmt: skip
def test_what_a_diverged_trial_had_before_is_said(
    values: tuple[float | None, ...], said: str
) -> None:
    seen = curve(0, *(value or 6.0 for value in values or (6.0,)))
    evals = tuple(
        point if value else point.model_copy(update={"value": None, "sum": None})
        for point, value in zip(seen.evals, values, strict=False)
    )
    ended = {"state": TrialState.DIVERGED, "evals": evals}
    ended["failure"] = Failure(kind="diverged", text="the loss is not finite")
    assert said in headline(StudyView(missed(seen.model_copy(update=ended))))


@pytest.mark.parametrize("saves", [True, False])
def test_a_trial_at_the_target_that_is_still_to_end_is_no_failure(saves: bool) -> None:
    half = curve(0, 6.0, 3.0).model_copy(
        update={"state": TrialState.FAILED, "stop_reason": StopReason.INTERRUPTED}
    )
    half = half.model_copy(update={"steps_done": 292, "total_steps": 585})
    data = missed(half)
    if saves:
        config = data.config.model_copy(update={"checkpoint": CheckpointSettings(every_minutes=1)})
        data = data.model_copy(update={"config": config})
    found = caveats_of(data)
    assert "closest_not_complete" not in found
    cut = found["closest_interrupted"]
    assert (cut.level, cut.numbers["trial"], cut.numbers["place"]) == (
        Level.NOTE,
        0,
        "step 292 of 585",
    )
    assert ("checkpoint" in cut.numbers["goes_on"]) is saves
    runs = half.model_copy(update={"state": TrialState.RUNNING, "stop_reason": None})
    assert caveats_of(missed(runs))["closest_running"].numbers["place"] == "step 292 of 585"


def test_a_study_without_trials_has_begun_none() -> None:
    data = missed().model_copy(update={"ended": None})
    assert headline(StudyView(data)) == "No trial has begun yet"
    assert headline(StudyView(missed())) == "No trial was begun"


def test_without_a_curve_the_most_epochs_are_an_end_of_the_space() -> None:
    """Others had fewer epochs and came no closer: that is all that says that more may help."""
    caveats = caveats_of(missed(curve(0, 5.0, epochs=4), curve(1, 6.0, epochs=2)))
    assert caveats["edge"].numbers["dimension"] == "epochs"
    assert caveats["edge"].numbers["end"] == "highest" and "no_direction" not in caveats


def test_a_reward_below_a_target_that_is_not_positive_misses_it() -> None:
    """Its share of a negative target has the other sign, and it has none of 0."""
    trials = rewarded(0, (-2.0, {})), rewarded(1, (-1.5, {}))
    negative = caveats_of(reward_study(*trials, target=-1.0))
    assert negative["target_missed"].numbers == {"trial": 1, "worse": pytest.approx(0.5)}
    assert "closest_not_complete" not in negative
    zero = caveats_of(reward_study(*trials, target=0.0))
    assert zero["target_of_0_missed"].numbers == {"trial": 1, "value": -1.5, "target": 0.0}
    near = caveats_of(reward_study(rewarded(0, (-0.995, {})), target=-1.0))
    assert near["near_target_single_run"].numbers["margin"] == pytest.approx(0.005)
    far = caveats_of(reward_study(rewarded(0, (-0.5, {})), target=-1.0))
    assert "near_target_single_run" not in far
    # 0 is no size that a margin could be a share of: the trials' range stands in for it.
    others = rewarded(1, (-1.0, {})), rewarded(2, (-2.0, {}))
    for reward, is_near in ((0.0, True), (0.001, True), (0.1, False)):
        at_zero = caveats_of(reward_study(rewarded(0, (reward, {})), *others, target=0.0))
        assert ("near_target_single_run" in at_zero) == is_near, reward


def repeat(number: int, repeat_of: int, perplexity: float | None, **changes) -> TrialRecord:
    """A run of a trial's configuration with another seed; None: it diverged."""
    if perplexity is None:
        changes = {"state": TrialState.DIVERGED, "evals": (), **changes}
    params = {"learning_rate": 1e-3 * (1 + repeat_of), "epochs": 2}
    seed = {"repeat_of": repeat_of, "seed": 3 + number}
    return trial(number, perplexity=perplexity, params=params, **seed, **changes)


def test_trials_whose_repeats_all_diverged_met_the_target_once() -> None:
    data = missed(
        trial(0, 1e-3, 3.0),
        trial(1, 2e-3, 3.5),
        trial(2, 3e-3, 4.2),
        repeat(3, 0, None),
        repeat(4, 1, None),
        repeat(5, 0, None, state=TrialState.PRUNED, stop_reason=StopReason.BUDGET),
        target=4.0,
    )
    rec = recommend(data)
    assert not rec.met
    assert [(each.trial, each.failed_replicate) for each in rec.rejected] == [(0, True), (1, True)]
    assert rec.failed_replicates == (3, 4)
    assert rec.closest is not None and rec.closest.trial == 2
    assert rec.closest.why.endswith("among those of which no repeat failed")
    caveats = caveats_of(data)
    assert caveats["met_once_repeats_failed"].numbers["trials"] == [0, 1]
    assert caveats["met_once_repeats_failed"].numbers["repeats"] == [3, 4]
    assert caveats["target_missed_by_others"].numbers["trial"] == 2
    wrong = {"single_runs", "no_direction", "edge", "target_missed", "rejected", "rejected_failed"}
    assert not wrong & caveats.keys()
    said = headline(StudyView(data))
    assert "2 met it in the search, but both repeats diverged" in said


@pytest.mark.parametrize(
    ("repeats", "said"),
    [
        ([repeat(2, 0, None)], "the one repeat diverged"),
        ([repeat(2, 0, 6.0)], "the mean over several seeds misses it"),
        ([repeat(2, 0, None), repeat(3, 0, 3.9)], "1 of 2 repeats diverged"),
        (
            [repeat(2, 0, None, state=TrialState.INFEASIBLE), repeat(3, 1, 9.0)],
            "1 of 2 repeats did not fit in memory, and otherwise",
        ),
        (  # one that the budget cut off says nothing
            [
                repeat(2, 0, None),
                repeat(3, 0, None, state=TrialState.PRUNED, stop_reason=StopReason.BUDGET),
            ],
            "the one repeat diverged",
        ),
    ],
)
def test_how_repeats_refuted_what_met_the_target_once(repeats, said: str) -> None:
    value = 3.0 if any(record.repeat_of == 1 for record in repeats) else 4.5
    data = missed(trial(0, 1e-3, 3.0), trial(1, 2e-3, value), *repeats, target=4.0)
    assert said in headline(StudyView(data))


def test_a_mean_that_misses_is_compared_with_the_target_and_shows_what_is_missing() -> None:
    data = missed(trial(0, 1e-3, 3.9), trial(1, 2e-3, 6.0), repeat(2, 0, 4.3), target=4.0)
    rec, caveats = recommend(data), caveats_of(data)
    assert rec.closest is not None and (rec.closest.trial, rec.closest.seeds) == (0, 2)
    assert caveats["met_once"].numbers["trials"] == [0]
    assert {"target_missed", "no_direction"} <= caveats.keys()


def test_trials_that_were_interrupted_or_run_are_named_in_the_count() -> None:
    stopped = {"state": TrialState.FAILED, "stop_reason": StopReason.INTERRUPTED}
    running = {"state": TrialState.RUNNING}
    done = [trial(0), trial(1)]
    assert trials_text(done) == "2 trials"
    assert trials_text([*done, trial(2, **stopped)]) == "3 trials (1 interrupted)"
    records = [*done, repeat(2, 0, 4.0), trial(3, **stopped), trial(4, **running)]
    assert trials_text(records) == "4 trials and 1 repeat (1 interrupted, 1 running)"
    assert trials_text([]) == "0 trials"
    again = [trial(0, attempt=3), trial(1, attempt=2)]
    assert trials_text(again) == "2 trials and 3 interrupted attempts"
    view = StudyView(missed(*done, trial(2, **stopped), target=6.0))
    (own,) = (tile for tile in tiles(view) if tile.label == "The study itself")
    assert own.note.endswith(trials_text(view.data.records))

"""Evaluations that stay JSON until they are asked for: what `carbonopt recommend` reads."""

import json
from pathlib import Path

import pytest
from commands import within
from small_studies import evaluation, many, study, trial
from sqlalchemy import text
from watched_pages import store

from carbonopt.core.errors import BadInput
from carbonopt.core.evaluations import KnownEnd, StoredEvaluations, broke_down_at
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import Failure, TrialRecord
from carbonopt.report.assemble import top, whole
from carbonopt.report.study_view import StudyView
from carbonopt.storage.study_storage import StudyStorage

POINTS = tuple(
    evaluation(9.0 - step, tokens=step).model_copy(update={"step": step, "train_energy_kwh": step / 1e5})
    for step in range(1, 6)
)  # fmt: skip


def parsed_trials(records: tuple[TrialRecord, ...]) -> list[int]:
    """The trials whose whole curve was parsed; none if it was not stored as JSON."""
    assert all(isinstance(record.evals, StoredEvaluations) for record in records)
    return [record.trial for record in records if "_points" in vars(record.evals)]


@pytest.mark.slow
def test_an_answer_is_the_same_and_parses_the_curves_of_two_trials(tmp_path: Path) -> None:
    data = many(12)
    records = tuple(
        record.model_copy(update={"evals": (*POINTS, *record.evals)}) for record in data.records
    )
    stored = store(data.model_copy(update={"records": records}), tmp_path)
    everything, answer = stored.read(), stored.read_for_answer()
    assert parsed_trials(answer.records) == []
    for target in (None, 5.0, 1.0):  # met, and met by none
        read, lazily = (StudyView(each, target) for each in (everything, stored.read_for_answer()))
        assert lazily.recommendation.as_json() == read.recommendation.as_json()
        assert top(lazily) == top(read)
        if target is None:  # the recommended trial's and the baseline's
            assert len(parsed_trials(lazily.data.records)) == 2
    assert answer == everything  # which parses all
    assert whole(StudyView(answer)) == whole(StudyView(everything))


def test_stored_evaluations_are_those_of_a_tuple() -> None:
    dumped = json.dumps([point.model_dump() for point in POINTS])
    stored = StoredEvaluations(dumped, PERPLEXITY, "trial 3")
    assert stored[-1] == POINTS[-1] and stored[1] == POINTS[1]
    losses = [point.loss(PERPLEXITY) for point in POINTS]
    assert stored.losses() == losses
    assert "_points" not in vars(stored)
    assert broke_down_at(stored, PERPLEXITY) == broke_down_at(POINTS, PERPLEXITY) is None
    broken = (*POINTS, evaluation(99.0, tokens=6).model_copy(update={"step": 6}))
    text_of = json.dumps([point.model_dump() for point in broken])
    unparsed = StoredEvaluations(text_of, PERPLEXITY, "trial 4")
    assert broke_down_at(unparsed, PERPLEXITY) == 5 and not unparsed.is_parsed
    assert unparsed == broken and broke_down_at(unparsed, PERPLEXITY) == 5
    assert stored == POINTS and len(stored) == 5 and stored[1:3] == POINTS[1:3]
    for empty in ("[]", "[ ]"):
        none = StoredEvaluations(empty, PERPLEXITY, "trial 3")
        assert not none
        with pytest.raises(IndexError):
            none[-1]
        assert len(none) == 0
    with pytest.raises(IndexError):
        stored[5]
    record = trial(3).model_copy(update={"evals": POINTS})
    assert record.model_copy(update={"evals": stored}).as_json() == record.as_json()


@pytest.mark.parametrize(
    "end",
    [
        KnownEnd(value=3.9, sum=None, count=None, total_steps=None),
        KnownEnd(value=None, sum=7.0, count=None, total_steps=None),
        KnownEnd(value=None, sum=None, count=99, total_steps=None),
        KnownEnd(value=None, sum=None, count=None, total_steps=4),
    ],
)
def test_the_last_evaluation_is_the_one_of_the_quality(end: KnownEnd) -> None:
    dumped = json.dumps([point.model_dump() for point in POINTS])
    assert StoredEvaluations(dumped, PERPLEXITY, "trial 3", end)[0] == POINTS[0]
    for read in (lambda stored: stored[-1], lambda stored: stored[4], list):
        with pytest.raises(BadInput, match="trial 3 is damaged: evals: the last "):
            read(StoredEvaluations(dumped, PERPLEXITY, "trial 3", end))


@pytest.mark.parametrize("text", ['[{"step": 50, "tok]', "[1] [2]"])
def test_a_text_that_is_no_json_is_damage(text: str) -> None:
    for read in (lambda stored: stored[-1], list):
        with pytest.raises(BadInput, match=r"^trial 3 is damaged: evals: .*; restore it from a"):
            read(StoredEvaluations(text, PERPLEXITY, "trial 3"))


@pytest.mark.parametrize(
    "words", ['it said , "evals": [1, 2], "state": and ended', "a ] and a }", '\\", "evals": []']
)
def test_words_in_a_record_are_not_taken_for_its_evaluations(tmp_path: Path, words: str) -> None:
    failure = Failure(kind=words, text=words)
    odd = evaluation(5.0, tokens=1).model_copy(update={"other_qualities": {words: 1.0}})
    record = trial(0, failure=failure, evals=(odd,))
    stored = store(study(record), tmp_path)
    assert stored.read_for_answer() == stored.read()


@pytest.mark.parametrize(
    ("before", "damaged"), [('"step": 5', '"step": 4'), ('"step": 5', '"step": -5')]
)
def test_damaged_evaluations_are_refused_when_they_are_needed(
    tmp_path: Path, before: str, damaged: str
) -> None:
    stored = store(study(trial(0, evals=POINTS), name="broken"), tmp_path)
    with stored._storage.engine.begin() as connection:
        replaced = connection.execute(
            text(
                "UPDATE trial_user_attributes SET value_json ="
                " replace(value_json, :before, :damaged) WHERE key = 'record'"
            ),
            {"before": before, "damaged": damaged},
        )
        assert replaced.rowcount == 1
    (record,) = stored.read_for_answer().records
    with pytest.raises(BadInput, match=r"'broken', trial 0.*evals"):
        list(record.evals)
    with pytest.raises(BadInput, match=r"'broken'.*trial 0.*evals"):
        StudyStorage(stored._storage, "broken").read()


def test_recommend_says_the_same_as_the_whole_study(tmp_path: Path) -> None:
    stored = store(many(12), tmp_path)
    done = within("recommend", tmp_path, "--json")
    view = StudyView(stored.read())
    expected = {
        **view.recommendation.as_json(),
        "caveats": [caveat.as_json() for caveat in top(view).caveats],
    }
    assert json.loads(done.stdout) == json.loads(json.dumps(expected))

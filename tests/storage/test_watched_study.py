"""Looks at a study that others change: only what changed is read, and it is what a whole reading has."""

import optuna
import pytest
from small_studies import study, trial
from sqlalchemy import text
from watched_pages import add, change, store

from carbonopt.core.errors import BadInput
from carbonopt.core.trial import TrialState
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect
from carbonopt.storage.watched_study import WatchedStudy
from carbonopt.storage.workers import leased

MICRO_BATCH = '"micro_batch_size_per_gpu": '


@pytest.fixture
def stored(tmp_path):
    return store(study(trial(0), trial(1), ended=None), tmp_path)


@pytest.fixture
def lease(stored):
    with leased(stored._storage, stored.study.study_name) as lease:
        yield lease


@pytest.fixture
def watched(tmp_path, stored):
    return WatchedStudy(StudyPaths(tmp_path))


def running(number, lease, **changes):
    worker = lease.worker.id
    return trial(number, perplexity=None, state=TrialState.RUNNING, worker=worker, **changes)


def end(stored, record):
    change(stored, record)
    own = stored.study.get_trials(deepcopy=False)[record.trial]
    values = [record.emissions_kg_co2e, record.value]
    stored._storage.set_trial_state_values(own._trial_id, optuna.trial.TrialState.COMPLETE, values)


def read_anew(stored, tmp_path):
    """The study as a reader finds it who has read nothing before."""
    anew = StudyStorage(connect(f"sqlite:///{tmp_path / 'study.db'}"), stored.study.study_name)
    return anew.read()


def test_each_look_sees_what_a_whole_reading_sees(stored, lease, watched, tmp_path):
    def steps():
        yield lambda: add(stored, running(2, lease))
        yield lambda: change(stored, running(2, lease, steps_done=1))
        yield lambda: add(stored, running(3, lease))
        yield lambda: change(stored, running(2, lease, steps_done=2))
        yield lambda: change(stored, running(3, lease, steps_done=7))
        yield lambda: end(stored, trial(2))
        yield lambda: stored.set_ended("because")
        yield lambda: change(stored, running(3, lease, steps_done=8))
        yield lambda: end(stored, trial(3))
        yield lambda: add(stored, trial(4))

    states = [watched.look()]
    for step in steps():
        step()
        states.append(watched.look())
        assert states[-1].data == read_anew(stored, tmp_path)
        assert states[-1] is watched.look()
    assert len({id(state) for state in states}) == 11


def test_only_running_trials_are_read_again(stored, lease, watched, monkeypatch):
    add(stored, running(2, lease))
    before = watched.look().data.records
    monkeypatch.setattr(StudyStorage, "snapshot", None)  # the whole reading
    change(stored, running(2, lease, steps_done=1))
    after = watched.look().data.records
    assert after[0] is before[0] and after[1] is before[1]
    assert (before[2].steps_done, after[2].steps_done) == (None, 1)


def test_heartbeats_are_no_news(stored, lease, watched):
    before = watched.look()
    version = watched._study.version()
    lease._heard_at_s = 0.0  # so that one is due
    lease.renew()
    assert watched._study.version() != version
    assert watched.look() is before


def test_a_worker_that_begins_or_ends_is_news(stored, watched):
    before = watched.look()
    with leased(stored._storage, stored.study.study_name) as lease:
        (worker,) = watched.look().workers
        assert worker.id == lease.worker.id
    after = watched.look()
    assert after.workers == before.workers == ()


def damage(stored, number):
    """Store a micro batch of which the batch is no multiple."""
    with stored._storage.engine.begin() as connection:
        damaged = connection.execute(
            text(
                "UPDATE trial_user_attributes SET value_json = replace(value_json, :good, :bad)"
                " WHERE key = 'record' AND trial_id ="
                " (SELECT trial_id FROM trials WHERE number = :number)"
            ),
            {"good": f"{MICRO_BATCH}8", "bad": f"{MICRO_BATCH}5", "number": number},
        )
        assert damaged.rowcount == 1


def test_a_running_trials_damaged_record_is_refused_at_each_look(stored, lease, watched):
    add(stored, running(2, lease))
    watched.look()
    damage(stored, 2)
    for _ in range(2):
        with pytest.raises(BadInput, match="trial 2"):
            watched.look()
    change(stored, running(2, lease, steps_done=1))
    assert watched.look().data.records[2].steps_done == 1


def test_a_finished_trials_damaged_record_is_refused_at_each_reading(stored):
    add(stored, trial(2))
    damage(stored, 2)
    for _ in range(2):
        with pytest.raises(BadInput, match="trial 2"):
            stored.read()

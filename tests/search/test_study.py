"""The search in whole studies, over tables of recorded runs that are made here."""

import contextlib
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from carbonopt.analysis.recommend import recommend
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput, StudyInterrupted
from carbonopt.core.trial import StopReason, TrialRecord, TrialState
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.run_study import run_study
from carbonopt.study.session import Session
from carbonopt.study_file.reader import parse_study
from carbonopt.study_file.study_checks import check

BATCHES, RATES, EPOCHS, MICROS = (16, 32, 64), (3e-4, 1e-3, 3e-3, 1e-2), (1, 2, 4), (4, 16)
SEQUENCES = 12_800


class Silent:
    """A display that shows nothing, and a tracker that tracks nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def nll(batch: int, rate: float, epochs: float, share: float) -> float:
    """Better with more steps, best at one rate for each batch."""
    off = math.log(rate / (2e-3 * math.sqrt(batch / 32)))
    return 1.4 + 5.0 * (epochs * SEQUENCES * share / 32) ** -0.3 + 0.04 * off**2


def row(batch: int, rate: float, epochs: float, micro: int) -> dict:
    total = int(SEQUENCES * epochs / batch)
    return {
        "params": {
            "global_batch_size": batch,
            "learning_rate": rate,
            "epochs": epochs,
            "micro_batch_size_per_gpu": micro,
        },
        "seed": 0,
        "total_steps": total,
        "joules_per_step": batch**0.7 * (1 + 8 / micro),
        "seconds_per_step": 0.01,
        "joules_per_eval": 1.0,
        "evals": [
            {"step": total * k // 8, "nll": nll(batch, rate, epochs, k / 8)} for k in range(1, 9)
        ],
    }


TABLE = [row(*combination) for combination in itertools.product(BATCHES, RATES, EPOCHS, MICROS)]
HALF = [run for run in TABLE if run["params"]["micro_batch_size_per_gpu"] == MICROS[-1]]

TABLES = Path(__file__).parents[2] / "reports" / "search" / "tables"


def is_of_the_grid(params: dict) -> bool:
    """Whether a run of the table of exact matches is of the grid that it has in full."""
    of_grid = params["global_batch_size"] != 16 and params["epochs"] != 2
    return of_grid and params["learning_rate"] < 5e-3


def final(run: dict) -> float:
    return run["evals"][-1]["nll"]


def joules(run: dict) -> float:
    return run["total_steps"] * run["joules_per_step"]


ANSWER_NLL = sorted(final(run) for run in TABLE)[
    len(TABLE) // 3
]  # a third of the configurations meet it
CHEAPEST = min((run for run in TABLE if final(run) <= ANSWER_NLL), key=joules)


class Replayed:
    """A study over rows of the table, in a folder."""

    def __init__(
        self,
        folder: Path,
        rows: list[dict] = TABLE,
        target_nll: float = ANSWER_NLL,
        **search: object,
    ) -> None:
        folder.mkdir(exist_ok=True)
        table = folder / "table.jsonl"
        table.write_text("".join(json.dumps(run) + "\n" for run in rows))
        self.paths = StudyPaths(folder / "out")
        self.paths.root.mkdir()
        space = {
            name: {"choices": sorted({run["params"][name] for run in rows})}
            for name in rows[0]["params"]
        }
        self.study: dict = {
            "name": "searched",
            "target": {"perplexity": math.exp(target_nll) * (1 + 1e-9)},
            "search": {"space": space, **search},
            "budget": {"trials": 60},
            "carbon": {"intensity_g_co2e_per_kwh": 500},
            "launch": {"kind": "replay", "table": str(table)},
        }

    def run(self, interrupted: Callable[[], bool] = lambda: False) -> StudyData:
        checked = check(parse_study(self.study, "test"))
        return run_study(Session(checked, "", self.paths, Silent(), Silent(), interrupted))


def is_row(params: TrialParams, run: dict) -> bool:
    return all(getattr(params, name) == value for name, value in run["params"].items())


def row_of(record: TrialRecord) -> dict:
    (matching_run,) = [run for run in TABLE if is_row(record.params, run)]
    return matching_run


def spent_joules(data: StudyData) -> float:
    return sum(record.energy_kwh.train for record in data.records) * 3.6e6


def after(questions: int) -> Callable[[], bool]:
    """An interruption that comes when it was asked for so many times."""
    asked = itertools.count()
    return lambda: next(asked) > questions


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StudyData:
    """The search over the whole table, as it is by default and never interrupted."""
    return Replayed(tmp_path_factory.mktemp("whole")).run()


@pytest.mark.slow
def test_the_cheapest_configuration_that_meets_the_target_is_found_and_the_search_ends(
    whole: StudyData,
) -> None:
    data, recommendation = whole, recommend(whole)
    assert recommendation.met and joules(CHEAPEST) == pytest.approx(
        recommendation.energy_kwh * 3.6e6, rel=0.02
    )
    assert data.ended is not None and data.ended.startswith("the model gives none of ")
    left = len(TABLE) - len(data.records)
    assert f" {left} untried configurations " in data.ended
    assert len(data.records) < len(TABLE) / 2
    keys = [json.dumps(record.params.as_record()) for record in data.records]
    assert len(set(keys)) == len(keys), "a configuration was run twice"


def test_converged_ends_sooner_and_says_what_another_trial_would_cost_and_save(
    whole: StudyData, tmp_path: Path
) -> None:
    study = Replayed(tmp_path)
    study.study["budget"] = {"until": "converged", "reuses": 1}
    data = study.run()
    assert data.ended is not None and data.ended.startswith(
        "converged: another trial is expected to cost "
    )
    assert data.ended.endswith(" in one run of what is recommended")
    assert recommend(data).met
    assert spent_joules(data) <= spent_joules(whole)


@pytest.mark.parametrize("change", [{"sampler": "tpe"}, {"goal": "front"}])
def test_only_a_search_that_expects_something_can_converge(change: dict, tmp_path: Path) -> None:
    study = Replayed(tmp_path, **change)
    study.study["budget"] = {"until": "converged"}
    with pytest.raises(BadInput, match=r"budget\.until: converged needs search\.sampler: carbon"):
        study.run()


def test_a_target_that_nothing_meets_ends_with_what_came_closest(tmp_path: Path) -> None:
    study = Replayed(tmp_path, target_nll=0.9 * min(map(final, TABLE)))
    study.study["budget"] = {"until": "converged"}
    data = study.run()
    recommendation = recommend(data)
    assert not recommendation.met and recommendation.trial is None
    assert data.ended == "converged: no configuration is expected to meet the target"
    assert recommendation.closest is not None
    assert len(data.records) < len(TABLE)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_target_far_from_the_first_trial_is_not_given_up(seed: int, tmp_path: Path) -> None:
    """The first trial of this recorded table has few exact matches, and another one 97 %."""
    lines = (TABLES / "library-exact-match.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if is_of_the_grid(row["params"])]
    study = Replayed(tmp_path, rows, seed=seed)
    study.study["target"] = {"exact_match": 0.97}
    study.study["budget"] = {"until": "converged"}
    data = study.run()
    assert recommend(data).met, data.ended


def test_a_single_configuration_is_run_once_to_its_end(tmp_path: Path) -> None:
    data = Replayed(tmp_path, [CHEAPEST]).run()
    assert [record.state for record in data.records] == [TrialState.COMPLETE]
    assert data.ended == "every configuration of the search space has been run"
    assert recommend(data).met


def test_a_table_with_missing_points_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no run of .*the nearest are"):
        Replayed(tmp_path, TABLE[:-1]).run()


@pytest.mark.slow
def test_the_front_is_all_of_the_front(tmp_path: Path) -> None:
    study = Replayed(tmp_path, HALF, goal="front")
    data = study.run()
    assert len(data.records) == len(HALF)
    assert data.ended == "every configuration of the search space has been run"
    front = [
        run
        for run in HALF
        if not any(
            joules(o) <= joules(run) and final(o) <= final(run) and o is not run for o in HALF
        )
    ]
    complete = [row_of(record) for record in data.records if record.state == TrialState.COMPLETE]
    assert all(run in complete for run in front), "a trial on the front was stopped"
    assert len(complete) < len(HALF), "nothing was stopped at all"


@pytest.mark.slow
def test_audited_trials_run_to_their_end_and_say_where_they_would_have_been_stopped(
    tmp_path: Path,
) -> None:
    pruned = Replayed(tmp_path / "pruned", HALF, pruning={"cap": False}).run()
    stopped = [record for record in pruned.records if record.stop_reason == StopReason.TARGET]
    assert stopped, "nothing was should_prune"
    assert all(final(row_of(record)) > ANSWER_NLL for record in stopped), (
        "one of them would have met the target"
    )
    audited = Replayed(tmp_path / "audited", HALF, pruning={"cap": False, "audit": 1.0}).run()
    assert {record.state for record in audited.records} == {TrialState.COMPLETE}
    marked = [record for record in audited.records if record.audited_at_step is not None]
    assert marked
    assert all(record.audited_at_step < record.total_steps for record in marked)


@pytest.mark.slow
def test_the_start_comes_first_and_is_never_stopped(tmp_path: Path) -> None:
    worst = max(HALF, key=final)["params"]
    data = Replayed(tmp_path, HALF, start=worst).run()
    first = data.records[0]
    assert first.state == TrialState.COMPLETE
    assert {name: getattr(first.params, name) for name in worst} == worst
    assert recommend(data).baseline.trial == 0


@pytest.mark.slow
def test_an_interrupted_study_runs_what_the_uninterrupted_one_does(
    whole: StudyData, tmp_path: Path
) -> None:
    broken = Replayed(tmp_path)
    data = None
    while data is None:
        with contextlib.suppress(StudyInterrupted):
            data = broken.run(after(150))
    assert max(record.attempt for record in data.records) > 1, "nothing was interrupted"
    assert [record.params for record in data.records] == [record.params for record in whole.records]
    assert [record.state for record in data.records] == [record.state for record in whole.records]
    assert data.ended == whole.ended


def test_a_dearer_system_setting_is_stopped_after_a_few_steps(tmp_path: Path) -> None:
    cheap = dict(CHEAPEST, params={**CHEAPEST["params"], "micro_batch_size_per_gpu": 16})
    dear = dict(
        cheap, params={**cheap["params"], "micro_batch_size_per_gpu": 4}, joules_per_step=1e3
    )
    study = Replayed(
        tmp_path, [cheap, dear], sampler="grid", pruning={"target": False}, start=cheap["params"]
    )
    first, second = study.run().records
    assert (first.state, second.state) == (TrialState.COMPLETE, TrialState.PRUNED)
    assert second.stop_reason == StopReason.CAP
    assert second.steps_done < 0.15 * second.total_steps


@pytest.mark.slow
def test_a_model_that_never_fits_ends_with_every_configuration_infeasible(
    tiny_study: dict, tmp_path: Path
) -> None:
    tiny_study["workload"]["model"]["from_config"]["n_inner"] = (
        10**14
    )  # more bytes than there are addresses
    tiny_study["search"]["space"] |= {"learning_rate": 1e-3, "epochs": 0.1}
    tiny_study["budget"] = {"trials": 5}
    paths = StudyPaths(tmp_path / "out")
    paths.root.mkdir()
    checked = check(parse_study(tiny_study, "test"))
    data = run_study(Session(checked, "", paths, Silent(), Silent(), lambda: False))
    assert [record.state for record in data.records] == [TrialState.INFEASIBLE] * 2
    assert all("allocate" in record.failure.text for record in data.records)
    assert data.ended == "every configuration of the search space has been run"
    assert not recommend(data).met

"""Calls of a study that has ended: nothing is started unless its file lets it go on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from carbonopt.core.errors import BadInput, StudyInterrupted
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.engines.replay import ReplayEngine
from carbonopt.spec.study_data import Hardware, StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url
from carbonopt.study.local_workers import LocalWorkers
from carbonopt.study.run_study import run_study
from carbonopt.study.session import Session
from carbonopt.study_file import study_checks
from carbonopt.study_file.reader import parse_study
from carbonopt.study_file.study_checks import check

# Each test takes seconds of real time.
pytestmark = pytest.mark.slow

EVERY_ONE = "every configuration of the search space has been run"


class Silent:
    """A display that shows nothing, and a tracker that tracks nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class Counted(LocalWorkers):
    """No local workers; they count how often they were told that there is something to run."""

    begun = 0

    def begin(self) -> None:
        self.begun += 1


class Replayed:
    """A replayed study in a folder, which notes how many of its calls had something to run."""

    def __init__(self, study: dict, folder: Path) -> None:
        self.study, self.paths, self.workers = study, StudyPaths(folder), Counted()
        self.paths.root.mkdir()
        self.study["search"]["sampler"] = "grid"

    def run(self, interrupted=lambda: False, *, joins: bool = False) -> StudyData:
        checked = check(parse_study(self.study, "test"))
        return run_study(
            Session(
                checked,
                "",
                self.paths,
                Silent(),
                Silent(),
                interrupted,
                local_workers=self.workers,
                joins=joins,
            )
        )

    @property
    def begun(self) -> int:
        return self.workers.begun

    def read(self) -> StudyData:
        return StudyStorage.of_folder(connect(storage_url(self.paths, None)), self.paths).read()


@pytest.fixture
def replayed(replay_study: dict, tmp_path: Path) -> Replayed:
    return Replayed(replay_study, tmp_path / "out")


def test_a_study_that_ended_by_energy_starts_nothing_until_its_budget_grows(
    replayed: Replayed,
) -> None:
    replayed.study["budget"] = {"energy_kwh": 1e-3}
    ended = replayed.run()
    assert ended.ended_by_budget and 0 < len(ended.records) < 27
    assert replayed.run() == ended and replayed.begun == 1
    replayed.study["budget"] = {"energy_kwh": 1.5e-3}
    more = replayed.run()
    assert replayed.begun == 2 and len(more.records) > len(ended.records)
    assert len(more.sessions) == len(ended.sessions) + 1


def test_a_study_that_ended_for_want_of_configurations_starts_nothing(replayed: Replayed) -> None:
    replayed.study["budget"] = {"trials": 60}
    ended = replayed.run()
    assert (ended.ended, len(ended.records)) == (EVERY_ONE, 27)
    assert replayed.run() == ended and replayed.begun == 1
    replayed.study["budget"] = {"trials": 61}
    assert replayed.run().ended == EVERY_ONE and replayed.begun == 2


@pytest.mark.parametrize("trials", [3, 60])
def test_a_choice_of_another_type_is_another_study(trials: int, replayed: Replayed) -> None:
    replayed.study["budget"] = {"trials": trials}
    begun = replayed.run()
    epochs = replayed.study["search"]["space"]["epochs"]
    whole = epochs["choices"]
    epochs["choices"] = list(map(float, whole))
    with pytest.raises(BadInput, match=r"another study: search\.space\.epochs\.choices"):
        replayed.run()
    epochs["choices"] = whole
    assert replayed.run().records == begun.records


def test_a_joining_worker_does_not_rely_on_a_stored_end(replayed: Replayed) -> None:
    replayed.study["budget"] = {"trials": 60}
    ended = replayed.run()
    joined = replayed.run(joins=True)
    assert replayed.begun == 2 and joined.records == ended.records


def test_an_end_is_forgotten_before_a_larger_budget_is_stored(replayed: Replayed) -> None:
    replayed.study["budget"] = {"energy_kwh": 1e-3}
    ended = replayed.run()
    replayed.study["budget"] = {"energy_kwh": 1.5e-3}
    with pytest.raises(StudyInterrupted):
        replayed.run(lambda: replayed.read().config.budget.energy_kwh == 1.5e-3)
    assert len(replayed.read().records) == len(ended.records)
    assert len(replayed.run().records) > len(ended.records)


def test_a_budget_that_ended_the_repeats_ends_them_again(replayed: Replayed) -> None:
    table = Path(replayed.study["launch"]["table"])
    rows = table.read_text()
    table.write_text(rows + rows.replace('"seed": 0', '"seed": 1'))
    replayed.study["budget"] = {"trials": 27}
    searched = replayed.run()
    limit = {"trials": 27, "energy_kwh": searched.spent_kwh()}
    replayed.study |= {"budget": limit, "confirm": {"seeds": 2}}
    ended = replayed.run()
    assert replayed.begun == 2 and ended.config.confirm is not None
    assert replayed.run() == ended and replayed.begun == 2


def test_a_study_keeps_its_carbon_intensity_when_another_codecarbon_has_another_figure(
    replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed.study |= {"carbon": {"country": "SWE"}, "budget": {"trials": 3}}
    begun = replayed.run().provenance.intensity
    later = begun.model_copy(update={"g_co2e_per_kwh": 2 * begun.g_co2e_per_kwh})
    monkeypatch.setattr(study_checks, "reference_intensity", lambda carbon: later)
    replayed.study["budget"] = {"trials": 6}
    data = replayed.run()
    assert data.provenance.intensity == begun and len(data.records) == 6
    for record in data.records:
        of_training = emissions_kg_co2e(record.energy_kwh.train, begun.g_co2e_per_kwh, 1.0)
        assert record.emissions_kg_co2e == pytest.approx(of_training)


def test_a_study_goes_on_with_the_devices_that_it_has_measured(
    replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Energies of two kinds of devices can't be compared."""
    first = Hardware(cpu="a CPU", cpu_cores=8, ram_gib=64, gpus=("a GPU",), driver="1.2")
    replayed.study["budget"] = {"trials": 3}
    monkeypatch.setattr(ReplayEngine, "hardware", first)
    replayed.run()
    replayed.study["budget"] = {"trials": 6}
    monkeypatch.setattr(
        ReplayEngine, "hardware", first.model_copy(update={"gpus": ("another GPU",)})
    )
    with pytest.raises(BadInput, match=r"another GPU .* a GPU"):
        replayed.run()
    assert len(replayed.read().records) == 3 and replayed.read().provenance.hardware == first
    newer = first.model_copy(update={"driver": "1.3", "ram_gib": 65})
    monkeypatch.setattr(ReplayEngine, "hardware", newer)
    assert len(replayed.run().records) == 6


def test_the_end_is_that_of_the_file_as_it_is_now(replayed: Replayed) -> None:
    replayed.study["budget"] = {"energy_kwh": 1e-3}
    ended = replayed.run()
    count = len(ended.records)
    replayed.study["budget"] = {"trials": count - 1, "energy_kwh": 1.0}
    now = replayed.run()
    assert replayed.begun == 1 and now.records == ended.records
    assert now.config.budget.energy_kwh == 1.0
    assert now.ended == f"{count} trials have been run, 1 more than the budget has"
    replayed.study["budget"] = {"trials": count, "energy_kwh": 1.0}
    assert replayed.run().ended == f"all {count} trials of the budget have been run"
    assert replayed.run(joins=True).config.budget == replayed.read().config.budget


def test_a_confirmation_that_is_put_back_with_fewer_seeds_names_its_runs(
    replayed: Replayed,
) -> None:
    table = Path(replayed.study["launch"]["table"])
    rows = table.read_text()
    seeds = [rows.replace('"seed": 0', f'"seed": {seed}') for seed in (1, 2)]
    table.write_text("".join([rows, *seeds]))
    replayed.study |= {"budget": {"trials": 12}, "confirm": {"seeds": 3, "runners_up": 0}}
    confirmed = replayed.run()
    assert "ran with 3 seeds" in confirmed.ended
    without = {key: value for key, value in replayed.study.items() if key != "confirm"}
    replayed.study = without
    alone = replayed.run()
    assert alone.config.confirm is None
    assert alone.ended == "all 12 trials of the budget have been run"
    replayed.study = {**without, "confirm": {"seeds": 2, "runners_up": 0}}
    again = replayed.run()
    assert again.config.confirm.seeds == 2 and "ran with 3 seeds" in again.ended
    assert replayed.begun == 1 and again.records == confirmed.records

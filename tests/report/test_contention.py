"""What other work on the machine did to the trials is said, first of all where the saving rests on
it.
"""

import json
from pathlib import Path

import pytest
import typer
from small_studies import script_run, script_study, study, trial

from carbonopt.analysis.recommend import recommend
from carbonopt.cli import recommend_command as cli
from carbonopt.cli.answers import print_recommendation
from carbonopt.core.states import CPU_CONTENTION_FROM
from carbonopt.core.trial import Stage, StageCost, TrialRecord
from carbonopt.report.document import Caveat, Level
from carbonopt.report.sections.contention_section import caveats
from carbonopt.report.study_view import StudyView
from carbonopt.report.writing import write_report
from carbonopt.spec.study_data import Provenance, SessionLedger

SAVING, PRUNED = "cpu_contention_saving", "cpu_contention_pruned"


def said(*waits: float | None) -> list[Caveat]:
    """Of trial 0, the baseline, trial 1, the cheapest, and trial 2."""
    runs = ((4e-3, 4.5), (1e-3, 5.0), (2e-3, 5.0))
    data = study(
        *(trial(number, *runs[number], cpu_wait_fraction=wait) for number, wait in enumerate(waits))
    )
    assert recommend(data).trial == 1
    return list(caveats(StudyView(data)))


@pytest.mark.parametrize("waits", [(None, None, None), (0.03, 0.04, CPU_CONTENTION_FROM - 0.01)])
def test_nothing_where_none_waited(waits) -> None:
    assert said(*waits) == []


def test_a_baseline_that_is_recommended_saves_nothing_that_could_be_doubtful() -> None:
    data = study(trial(0, 1e-3, cpu_wait_fraction=0.366), trial(1, 2e-3))
    assert recommend(data).trial == 0
    assert [caveat.key for caveat in caveats(StudyView(data))] == ["cpu_contention"]


def test_the_one_that_is_recommended_waited_and_the_saving_is_doubtful() -> None:
    (caveat,) = said(0.03, 0.366, 0.9)
    assert (caveat.key, caveat.level) == (SAVING, Level.CRITICAL)
    role = "a run of the recommendation"
    assert caveat.numbers == {"count": 2, "trial": 1, "share": 0.366, "role": role}
    assert "2 trials" in caveat.text and "36.6 %" in caveat.text


def test_others_that_waited_cost_too_much_and_no_more() -> None:
    (caveat,) = said(0.03, 0.04, 0.5)
    assert (caveat.key, caveat.level) == ("cpu_contention", Level.NOTE)
    assert caveat.numbers == {"count": 1, "trial": 2, "share": 0.5}


def test_what_the_cap_stopped_while_it_waited_may_be_cheaper() -> None:
    def stopped_caveats(*stopped: int) -> list[Caveat]:
        capped = [
            trial(number, 1.1e-3, state="pruned", stop_reason="cap", cpu_wait_fraction=wait)
            for number, wait in ((2, 0.03), *((number, 0.4) for number in stopped))
        ]
        data = study(
            trial(0, 4e-3, cpu_wait_fraction=0.03), trial(1, 1e-3, cpu_wait_fraction=0.04), *capped
        )
        return list(caveats(StudyView(data)))

    assert stopped_caveats() == []
    _, pruned = stopped_caveats(3)
    assert (pruned.key, pruned.level, pruned.numbers) == (PRUNED, Level.CRITICAL, {"trials": [3]})
    _, pruned = stopped_caveats(3, 4, 5, 6, 7, 8, 9)
    assert (
        pruned.numbers == {"trials": [3, 4, 5, 6, 7, 8, 9]}
        and "3, 4, 5, 6, 7 and 2 more" in pruned.text
    )


def test_a_repeat_of_what_is_compared_counts() -> None:
    again = trial(
        2, 1e-3, repeat_of=1, seed=4, cpu_wait_fraction=0.5, params={"learning_rate": 2e-3}
    )
    (caveat,) = caveats(StudyView(study(trial(0, 4e-3, 4.5), trial(1, 1e-3), again)))
    assert (caveat.key, caveat.numbers["trial"]) == (SAVING, 2)


def test_a_caveat_has_the_same_words_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    """On the page, in the Markdown, in the paper, in the model card, in the terminal and in what
    scripts read.
    """
    for wait, doubtful in ((0.04, False), (0.5, True)):
        data = study(trial(0, 4e-3, 4.5), trial(1, 1e-3, cpu_wait_fraction=wait))
        write_report(data, tmp_path)
        report = json.loads((tmp_path / "data" / "report.json").read_text())["document"]["caveats"]
        keys = [caveat["key"] for caveat in report]
        assert (SAVING in keys) is doubtful and (not doubtful or keys[0] == SAVING)
        fact, advice = (
            "the saving can't be trusted.",
            "Run the study again where nothing else runs.",
        )
        words = f"{fact} {advice}"
        for name in (
            "index.html",
            "report.md",
            "paper/methods.tex",
            "paper/statement.tex",
            "winner/model_card.md",
        ):
            text = " ".join(
                (tmp_path / name).read_text().replace("&#39;", "'").replace("{}", "").split()
            )
            is_paper = name.startswith(
                "paper/"
            )  # which states facts and tells its reader to do nothing
            assert ((fact if is_paper else words) in text) is doubtful, name
            assert not (is_paper and advice in text), name
        assert print_recommendation(data)
        assert (words in capsys.readouterr().out) is doubtful

        monkeypatch.setattr(
            cli, "read_study_folder", lambda *arguments, data=data, **how: (None, data)
        )
        for target, trusted in (
            (None, not doubtful),
            (4.6, True),
        ):  # for 4.6 the baseline is the answer
            with pytest.raises(typer.Exit):
                cli.recommend(tmp_path, target=target, as_json=True)
            answer = json.loads(capsys.readouterr().out)
            assert answer["trial"] == (1 if target is None else 0)
            caveats_by_key = {caveat["key"]: caveat for caveat in answer["caveats"]}
            assert (SAVING not in caveats_by_key) is trusted
            if target is None:
                assert answer["caveats"] == report


CHARGED = "cpu_contention_charged"
TOLD, UNTOLD = (
    SessionLedger(started_at="2026-01-01T00:00:00Z", other_kwh=other) for other in (1e-5, None)
)
OF_THE_CPU = study().provenance.model_copy(
    update={"energy_source": {"cpu": "modelled", "ram": "modelled"}}
)


def keys(*runs: TrialRecord, session: SessionLedger, provenance: Provenance) -> list[str]:
    data = study(*runs, sessions=(session,), provenance=provenance)
    return [caveat.key for caveat in caveats(StudyView(data))]


def test_only_what_is_charged_by_cpu_time_leaves_the_time_of_waiting_out() -> None:
    """Without a GPU, which draws power while it waits, and in studies that know what other work
    used.
    """
    runs = trial(0, 4e-3, 4.5), trial(1, 1e-3, cpu_wait_fraction=0.5)
    capped = trial(2, 1.1e-3, state="pruned", stop_reason="cap", cpu_wait_fraction=0.6)
    assert keys(*runs, capped, session=TOLD, provenance=OF_THE_CPU) == [SAVING]
    for session, provenance in ((UNTOLD, OF_THE_CPU), (TOLD, study().provenance)):
        assert keys(*runs, capped, session=session, provenance=provenance) == [SAVING, PRUNED]


@pytest.mark.parametrize(("wait", "level"), [(0.3, Level.WARNING), (0.4, Level.CRITICAL)])
def test_a_saving_of_what_waited_long_is_not_to_be_trusted(wait: float, level: Level) -> None:
    runs = trial(0, 4e-3, 4.5, cpu_wait_fraction=wait), trial(1, 1e-3, cpu_wait_fraction=0.03)
    data = study(*runs, sessions=(TOLD,), provenance=OF_THE_CPU)
    (caveat,) = caveats(StudyView(data))
    assert (caveat.level, caveat.numbers["trial"]) == (level, 0)
    assert (caveat.key == SAVING) is (level is Level.CRITICAL)
    alone = study(runs[0], sessions=(TOLD,), provenance=OF_THE_CPU)  # no saving is stated
    assert [caveat.level for caveat in caveats(StudyView(alone))] == [Level.WARNING]


@pytest.mark.parametrize("decisive", ["recommended", "repeat", "baseline", "capped", None])
def test_a_slowed_trial_that_decides_is_a_warning_also_by_cpu_time(decisive: str | None) -> None:
    """OpenMP's threads spin while one of them waits: CPU time rises, too."""

    def wait_if(role: str) -> float:
        return 0.3 if role == decisive else 0.03

    same = {"params": {"learning_rate": 2e-3}}
    runs = (
        trial(0, 4e-3, 4.5, cpu_wait_fraction=wait_if("baseline")),
        trial(1, 1e-3, cpu_wait_fraction=wait_if("recommended")),
        trial(2, 1e-3, repeat_of=1, seed=4, cpu_wait_fraction=wait_if("repeat"), **same),
        trial(3, 2e-3, state="pruned", stop_reason="cap", cpu_wait_fraction=wait_if("capped")),
        trial(4, 3e-3, cpu_wait_fraction=0.9),
    )
    data = study(*runs, sessions=(TOLD,), provenance=OF_THE_CPU)
    (caveat,) = caveats(StudyView(data))
    trials = {"baseline": 0, "recommended": 1, "repeat": 2, "capped": 3, None: 4}
    level = Level.NOTE if decisive is None else Level.WARNING
    assert (caveat.level, caveat.numbers["trial"]) == (level, trials[decisive])
    assert caveat.key == (CHARGED if decisive is None else f"{CHARGED}_saving")
    words = {"baseline": "baseline", "capped": "stopped", None: ""}.get(decisive, "recommendation")
    assert words in caveat.numbers.get("role", "")


def test_a_script_whose_waiting_is_not_known_is_noted_once() -> None:
    runs = script_run(0, 25.0, cpu_wait_fraction=0.03), script_run(1, 25.0), script_run(2, 25.0)
    (caveat,) = caveats(StudyView(script_study(*runs)))
    assert (caveat.key, caveat.level) == ("cpu_contention_unknown", Level.NOTE)
    assert list(caveats(StudyView(script_study(runs[0])))) == []


def uneven_caveats(repeats_kg: dict[int, list[float]]) -> list[Caveat]:
    """Return the caveats of a study with repeats of trial 1, the cheapest, and of others."""
    runs = [trial(0, 4e-3, 4.5), trial(1, 1e-3, 5.0), trial(2, 2e-3, 5.0)]
    for first, of_first in repeats_kg.items():
        for seed, kg in enumerate(of_first, 1):
            runs.append(trial(len(runs), kg, 5.0, repeat_of=first, seed=seed))
    return list(caveats(StudyView(study(*runs))))


def test_repeats_that_emit_about_the_same_say_nothing() -> None:
    assert uneven_caveats({1: [1.3e-3, 0.95e-3]}) == []


def test_a_disturbed_run_of_the_winner_may_change_the_answer() -> None:
    (caveat,) = uneven_caveats({1: [1.1e-3, 4e-3]})
    assert (caveat.key, caveat.level) == ("uneven_runs_decisive", Level.CRITICAL)
    assert caveat.numbers == {"trial": 4, "times": pytest.approx(4.0), "other": 1}


def test_a_disturbed_run_that_hides_the_cheapest_is_decisive() -> None:
    """Trial 1 emitted least, but its repeat makes its mean dearer than that of trial 2."""
    (caveat,) = uneven_caveats({1: [9e-3], 2: [2.1e-3]})
    assert (caveat.key, caveat.numbers["trial"]) == ("uneven_runs_decisive", 3)


def test_a_run_that_compiled_what_the_others_loaded_was_not_disturbed() -> None:
    """Without its first step it takes 1.2 times what its repeat took."""
    compiling = {
        Stage.COMPILE: StageCost(duration_s=9.0, energy_kwh=1.81e-3),
        Stage.STEPS: StageCost(duration_s=9.0, energy_kwh=1.19e-3),
    }
    first = trial(1, 3e-3, stages=compiling, steps_done=120)
    data = study(trial(0, 9e-3, 4.5), first, trial(2, 1e-3, repeat_of=1, seed=1))
    assert first.first_step_excess_kwh == pytest.approx(1.8e-3)
    assert list(caveats(StudyView(data))) == []


def test_a_disturbed_run_of_a_dearer_trial_changes_no_answer() -> None:
    (caveat,) = uneven_caveats({1: [1.1e-3], 2: [8e-3]})
    assert (caveat.key, caveat.level) == ("uneven_runs", Level.WARNING)
    assert caveat.numbers == {"trial": 4, "times": pytest.approx(4.0), "other": 2}


def test_where_no_trial_meets_the_target_the_closest_decides() -> None:
    """The baseline waited longest, but it is no answer."""
    charged = {"sessions": (SessionLedger(started_at="2024-03-05T18:00:00+00:00", other_kwh=0.1),)}
    data = study(
        trial(0, 4e-3, 9.0, cpu_wait_fraction=0.3),
        trial(1, 1e-3, 7.0, cpu_wait_fraction=0.4),
        trial(2, 1e-3, 8.0, cpu_wait_fraction=0.5),
        target=6.0,
    )
    source = {**data.provenance.energy_source}
    source.pop("gpu", None)
    provenance = data.provenance.model_copy(update={"energy_source": source})
    (caveat,) = caveats(StudyView(data.model_copy(update={**charged, "provenance": provenance})))
    assert (caveat.key, caveat.numbers["trial"]) == ("cpu_contention_charged_saving", 1)

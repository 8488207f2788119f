"""What other work on the machine did to the trials is said, first of all where the saving rests on it."""

import json
from pathlib import Path

import pytest
import typer
from small_studies import study, trial

from carbonopt.analysis.recommend import recommend
from carbonopt.cli import app as cli
from carbonopt.cli.app import _print_recommendation
from carbonopt.report.build import write_report
from carbonopt.report.cpu_contention import CPU_CONTENTION_FROM, cpu_contention, doubted


def said(*waits: float | None) -> tuple[str, ...]:
    """Of trial 0, the baseline, trial 1, the cheapest, and trial 2."""
    energies = (4e-3, 1e-3, 2e-3)
    trials = [trial(number, energies[number], cpu_wait_fraction=wait) for number, wait in enumerate(waits)]
    data = study(*trials)
    rec = recommend(data)
    assert rec.trial == 1
    return cpu_contention(data, rec)


@pytest.mark.parametrize("waits", [(None, None, None), (0.03, 0.04, CPU_CONTENTION_FROM - 0.01)])
def test_nothing_where_none_waited(waits) -> None:
    assert said(*waits) == ()


def test_the_one_that_is_recommended_waited_and_the_saving_is_doubtful() -> None:
    (found,) = said(0.03, 0.366, 0.9)
    assert "kept 2 trials waiting for the cores, trial 1, the recommended one, for 36.6 %" in found
    assert found.endswith("so that the saving can't be trusted. Run the study again where nothing else runs.")


def test_others_that_waited_cost_too_much_and_no_more() -> None:
    (found,) = said(0.03, 0.04, 0.5)
    assert "kept 1 trial waiting for the cores, trial 2 for 50 %" in found and "so that" not in found


def test_what_the_cap_stopped_while_it_waited_may_be_cheaper() -> None:
    def found(*stopped: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        capped = [
            trial(number, 1.1e-3, state="pruned", stop_reason="cap", cpu_wait_fraction=wait)
            for number, wait in ((2, 0.03), *((number, 0.4) for number in stopped))
        ]
        data = study(trial(0, 4e-3, cpu_wait_fraction=0.03), trial(1, 1e-3, cpu_wait_fraction=0.04), *capped)
        rec = recommend(data)
        return cpu_contention(data, rec), doubted(data, rec)

    assert found() == ((), ())
    (said,), doubts = found(3)
    assert "so that trial 3, stopped for emitting more than the best one, may be cheaper than that. Run" in said
    assert doubts == (said,)
    (said,), doubts = found(3, 4, 5, 6)
    assert "so that trials 3, 4, 5 and others, stopped for" in said and "saving" not in said


def test_a_repeat_of_what_is_compared_counts() -> None:
    data = study(
        trial(0, 4e-3),
        trial(1, 1e-3),
        trial(2, 1e-3, repeat_of=1, seed=4, cpu_wait_fraction=0.5, params={"learning_rate": 2e-3}),
    )
    (found,) = cpu_contention(data, recommend(data))
    assert "saving can't be trusted" in found
    assert doubted(data, recommend(data)) == (found,)


def test_a_doubt_stands_beside_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """In the report, in the terminal and in what scripts read."""
    for wait, doubtful in ((0.04, False), (0.5, True)):
        data = study(trial(0, 4e-3, 4.5), trial(1, 1e-3, cpu_wait_fraction=wait))
        write_report(data, tmp_path)
        lead = json.loads((tmp_path / "data" / "report.json").read_text())["shown"]["lead"]
        assert _print_recommendation(data)
        said = capsys.readouterr().out
        assert [("the saving can't be trusted" in text) for text in (lead, said)] == [doubtful, doubtful]

        monkeypatch.setattr(cli, "_read", lambda *arguments, data=data: (None, data))
        for target, trusted in ((None, not doubtful), (4.6, True)):  # for 4.6 the baseline is the answer
            with pytest.raises(typer.Exit):
                cli.recommend(tmp_path, target=target, as_json=True)
            answer = json.loads(capsys.readouterr().out)
            assert answer["trial"] == (1 if target is None else 0)
            assert answer["caveats"] == ([] if trusted else list(doubted(data, recommend(data))))


def test_a_model_card_doubts_what_it_says_itself(tmp_path: Path) -> None:
    def card(*waits: float) -> str:
        stopped = trial(2, 1.1e-3, state="pruned", stop_reason="cap", cpu_wait_fraction=waits[2])
        data = study(
            trial(0, 4e-3, 4.5, cpu_wait_fraction=waits[0]), trial(1, 1e-3, cpu_wait_fraction=waits[1]), stopped
        )
        assert recommend(data).trial == 1
        write_report(data, tmp_path)
        return (tmp_path / "winner" / "model_card.md").read_text().replace("\\", "")

    assert "Other work" not in card(0.5, 0.04, 0.04)  # the baseline, of which it says nothing
    own = "Other work on the machine kept it waiting for the cores, for 50 % of the time that it could have used them: "
    assert f"{own}this energy and these emissions are too high." in card(0.04, 0.5, 0.04)
    search = "Other work on the machine slowed the search: trial 2, stopped for emitting more than the best one, may be"
    assert f"{search} cheaper than that." in card(0.04, 0.04, 0.5)

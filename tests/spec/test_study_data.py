"""What is said of a study's sessions."""

from carbonopt.spec.study_data import SessionLedger, counted_at_once


def session(worker: str, start_s: int, duration_s: float, share: float | None) -> SessionLedger:
    began = f"2026-11-25T20:00:{start_s:02d}+00:00"
    return SessionLedger(
        started_at=began, worker=worker, duration_s=duration_s, machine_share=share
    )


def test_calls_at_once_on_a_machine_count_it_as_often_as_their_shares_say() -> None:
    crew = [session("a-1-f", 0, 30, 0.5), session("a-2-f", 1, 30, 0.5)]
    joined = session("a-3-f", 10, 10, 1.0)
    later, elsewhere, agents = (
        session("a-4-f", 31, 20, 1.0),
        session("b-c-5-f", 0, 60, 1.0),
        session("a-6-f", 0, 60, None),
    )
    assert counted_at_once([*crew, later, elsewhere, agents]) == {"a": 1.0, "b-c": 1.0}
    assert counted_at_once([*crew, joined]) == {"a": 2.0}


def test_calls_one_after_the_other_beside_a_long_one_are_not_at_once() -> None:
    """Each of them was counted, so that four calls of which two worked at once were four times."""
    short = [session(f"a-{k}-f", 10 * k, 5, 1.0) for k in (1, 2, 3)]
    assert counted_at_once([session("a-9-f", 0, 60, 1.0), *short]) == {"a": 2.0}

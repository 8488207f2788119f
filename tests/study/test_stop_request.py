"""Signals as a wish: who asks for it, when it ends a command at once, and what nohup has said
before.
"""

import os
import signal
import threading
import time
from contextlib import suppress

import pytest

from carbonopt.core.errors import StudyInterrupted
from carbonopt.study import stop_request
from carbonopt.study.stop_request import interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_a_wish_and_ends_at_once_where_nobody_asks(number: int) -> None:
    before = signal.getsignal(number)
    with interruptible() as wish:
        assert not wish()
        os.kill(os.getpid(), number)
        assert wish()
    assert signal.getsignal(number) == before
    with pytest.raises(StudyInterrupted), interruptible() as wish:
        wish.raise_on_signal()
        os.kill(os.getpid(), number)
    with pytest.raises(StudyInterrupted), interruptible() as wish:
        os.kill(os.getpid(), number)
        wish.raise_on_signal()


def test_a_second_ctrl_c_ends_at_once_before_anything_is_measured() -> None:
    with pytest.raises(StudyInterrupted), interruptible() as wish:
        os.kill(os.getpid(), signal.SIGINT)
        assert wish()
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_ctrl_c_leaves_time_to_store_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with interruptible() as wish:
        wish.let_signals_wait()
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            now_s += stop_request.TIME_TO_STORE_S / 4 - 0.1
            assert wish()
    with pytest.raises(StudyInterrupted), interruptible() as wish:
        wish.let_signals_wait()
        os.kill(os.getpid(), signal.SIGINT)
        now_s += stop_request.TIME_TO_STORE_S
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may repeat it
        assert wish()
        os.kill(os.getpid(), signal.SIGINT)


def test_what_nohup_has_started_goes_on_when_the_terminal_is_closed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible() as wish:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not wish()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_is_asked_by_a_function_and_leaves_signals_alone() -> None:
    asked, said = threading.Event(), list[bool]()

    def work() -> None:
        with interruptible(asked.is_set) as wish:
            said.append(wish())
            asked.set()
            said.append(wish())

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == [False, True]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("ends", [StudyInterrupted, ValueError, None])
def test_a_part_of_a_program_passes_the_signal_on_at_its_end(ends: type | None) -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with suppress(StudyInterrupted, ValueError), interruptible(passes_on=True) as wish:
            os.kill(os.getpid(), signal.SIGTERM)
            assert wish() and heard == []
            if ends is not None:
                raise ends("over")
        assert heard == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt), interruptible(passes_on=True) as wish:
            os.kill(os.getpid(), signal.SIGINT)
            assert wish()
    finally:
        signal.signal(signal.SIGTERM, before)

"""What `carbonopt watch` costs and sends, beside a study of 1,000 trials whose storage changes every
2 s. Nothing is trained.

    python benchmarks/live_page.py
"""

import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from small_studies import many, trial
from watched_pages import Stream, add, change, store, watching

from carbonopt.core.trial import Durations, Energy, TrialRecord, TrialState
from carbonopt.storage.workers import leased

CHANGES, EVERY_S = 20, 2.0


def running(number: int, step: int, worker: str) -> TrialRecord:
    seconds, kwh = 2.0 * step, 1e-5 * step
    return trial(
        number,
        perplexity=None,
        state=TrialState.RUNNING,
        worker=worker,
        steps_done=step,
        started_at="2026-01-01T00:00:00+00:00",
        evals=(),
        total_steps=CHANGES + 1,
        duration_s=Durations(train=seconds, setup=0, eval=0, total=seconds),
        energy_kwh=Energy(train=kwh, setup=0, eval=0, total=kwh),
    )


def listen(stream: Stream, messages: list) -> None:
    try:
        while True:
            messages.append(stream.next())
    except (OSError, ValueError, AssertionError, AttributeError):
        return  # closed


def measured(folder: Path, pages: int, stored, worker: str, number: int) -> None:
    with watching(folder) as server:
        streams = [Stream(server.url) for _ in range(pages)]
        heard: list[list] = [[] for _ in streams]
        for stream, messages in zip(streams, heard, strict=True):
            threading.Thread(target=listen, args=(stream, messages), daemon=True).start()
        began_s = time.monotonic()
        while not any("contents" in message.content for message in heard[0]):
            time.sleep(0.05)
        print(f"{pages} pages: everything after {time.monotonic() - began_s:.2f} s,", end=" ")
        print(f"{heard[0][0].size} bytes")
        while not any("section energy" in message.content for message in heard[0]):
            time.sleep(0.5)  # the sections that take seconds, for a share of a core of their own
        print(f"  sections that take seconds: after {time.monotonic() - began_s:.0f} s", end="")
        print(f" and {server.cpu_s():.1f} s of CPU since the command's start")
        time.sleep(5)
        quiet = server.cpu_s()
        time.sleep(10)
        quiet = (server.cpu_s() - quiet) / 10
        before_s, used_s, changes_s = time.monotonic(), server.cpu_s(), []
        for step in range(1, CHANGES + 1):
            changes_s.append(time.monotonic())
            record = running(number, step, worker)
            (add if step == 1 else change)(stored, record)
            time.sleep(EVERY_S)
        share = (server.cpu_s() - used_s) / (time.monotonic() - before_s)
        print(
            f"  CPU: {quiet:.2%} of a core while nothing changes, {share:.2%} with a change", end=""
        )
        print(f" every {EVERY_S:g} s")
        time.sleep(5)
        new = [message for message in heard[-1] if message.came_s >= changes_s[0]]
        waits = [
            min(message.came_s for message in new if message.came_s >= changed_s) - changed_s
            for changed_s in changes_s
        ]
        print(f"  change to page: {min(waits):.2f} to {max(waits):.2f} s")
        print(f"  bytes: {sorted(message.size for message in new)}")
        ended = trial(number, worker=worker)
        changed_s = time.monotonic()
        finish(stored, ended)
        time.sleep(4)
        new = [message for message in heard[-1] if message.came_s >= changed_s]
        delays = [f"{message.came_s - changed_s:.2f} s, {message.size} bytes" for message in new]
        print(f"  the trial's end: {'; '.join(delays)}")
        for stream in streams:
            stream.close()


def finish(stored, record: TrialRecord) -> None:
    import optuna

    change(stored, record)
    own = stored.study.get_trials(deepcopy=False)[record.trial]
    values = [record.emissions_kg_co2e, record.value]
    stored._storage.set_trial_state_values(own._trial_id, optuna.trial.TrialState.COMPLETE, values)


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "study"
        stored = store(many(1000).model_copy(update={"ended": None}), folder)
        with leased(stored._storage, stored.study.study_name) as lease:
            for place, pages in enumerate((1, 20)):
                measured(folder, pages, stored, lease.worker.id, 1000 + place)


if __name__ == "__main__":
    main()

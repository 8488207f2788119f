"""Two threads that read and draw, however many pages are open.

One looks at the storage once a second while a page is open, and draws what changed quickly. The
other draws what takes seconds, for a small share of a core.
"""

import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from carbonopt.core.errors import CarbonoptError
from carbonopt.report.document import Document, Section
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.watched_study import Sight
from carbonopt.watch.now_panel import Panel, empty_panel
from carbonopt.watch.page_parts import (
    document_parts,
    pipeline_document,
    quick_document,
    settled,
    slow_sections,
    study_document,
)
from carbonopt.watch.running_study import clock_text

LOOK_EVERY_S = 1.0
# Shares of a core: the document while no trial ends, and the slow sections. After a drawing of 1 s
# they rest for 17 and 8 min.
_DOCUMENT_SHARE, _SLOW_SHARE = 0.001, 0.002
# A look may fall into the moment in which a study or its first trial is being stored.
_FAILURES_SAID_FROM = 2

Parts = dict[str, list[str]]


class Watcher:
    """Keeps the page's parts up to date.

    Args:
        look: reads the watched folder.
    """

    def __init__(self, look: Callable[[], Sight]) -> None:
        self._look = look
        self._publish: Callable[[Parts], None] = lambda parts: None
        self.error: BaseException | None = None  # an error of the program that has ended a thread
        self._wanted, self._ended = threading.Event(), threading.Event()
        self._slow = SlowDrawing(self._wanted, self._ended)
        self._threads: list[threading.Thread] = []
        self._panels: dict[str, Panel] = {}
        self._failures = 0
        self._failing_since: datetime | None = None
        self._sight: Sight | None = None
        self._now: list[str] = []
        self._settled: object = None
        self._is_stale = False  # whether the document lacks a change
        self._rests_until_s = 0.0  # monotonic; until then the document waits for a trial to end
        self._document: Parts = {}
        self._quick: tuple[Document, Mapping[str, Section]] | None = None
        self._slow_drawn = -1

    def look(self) -> None:
        """Look for the first time, before `start`.

        Raises:
            CarbonoptError: if the folder can't be read.
        """
        self._see(self._look())

    def start(self, publish: Callable[[Parts], None]) -> None:
        """Start the threads; `publish` receives all parts now and after each look."""
        self._publish = publish
        publish(self._parts(""))
        for run in (self._run, self._slow.run):
            thread = threading.Thread(target=self._guarded, args=(run,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 – `serve` raises it again
            self.error = error

    def want(self, wanted: bool) -> None:
        """Say whether a page is open; nothing is read while none is."""
        if wanted:
            self._wanted.set()
        else:
            self._wanted.clear()

    def end(self) -> None:
        self._ended.set()
        self._wanted.set()

    def join(self, patience_s: float) -> bool:
        """Wait for the threads to end, after `end`; return whether they have."""
        deadline = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while self._wanted.wait() and not self._ended.is_set():
            began_s = time.monotonic()
            self._look_again()
            self._ended.wait(max(0.0, began_s + LOOK_EVERY_S - time.monotonic()))

    def _look_again(self) -> None:
        try:
            sight = self._look()
        except (CarbonoptError, OSError) as error:
            self._failures += 1
            self._failing_since = self._failing_since or datetime.now(UTC)
            if self._failures >= _FAILURES_SAID_FROM:
                self._publish(self._parts(f"{error}"))
            return
        self._failures, self._failing_since = 0, None
        self._see(sight)

    def _see(self, sight: Sight) -> None:
        before, self._sight = self._sight, sight
        has_changed = before is None or sight.studies != before.studies
        if has_changed:
            self._now = self._drawn_now(sight)
            self._is_stale = True
            self._publish(self._parts(""))  # before the document, which takes longer
        self._draw_document(sight, has_changed=has_changed)
        self._publish(self._parts(""))

    def _parts(self, trouble: str) -> Parts:
        since = "" if self._failing_since is None else clock_text(self._failing_since)
        said = [f"Since {since}: {trouble} Shown is what was read last."] if trouble else []
        return {"trouble": said, "now": self._now, **self._document}

    def _drawn_now(self, sight: Sight) -> list[str]:
        if not sight.studies:
            return empty_panel().split("\n")
        # Of a pipeline the steps that are at work, else the one that began last.
        at_work = {name: state for name, state in sight.studies.items() if state.workers}
        latest = list(sight.studies)[-1]
        shown = at_work or {latest: sight.studies[latest]}
        panels = (
            self._panels.setdefault(name, Panel(name)).draw(state) for name, state in shown.items()
        )
        return "\n".join(panels).split("\n")

    def _draw_document(self, sight: Sight, *, has_changed: bool) -> None:
        if not sight.studies:
            self._document, self._settled = {}, None
            return
        is_new = self._is_stale and time.monotonic() > self._rests_until_s
        if has_changed:
            now = tuple(settled(state.data) for state in sight.studies.values())
            is_new = is_new or now != self._settled
            self._settled = now
        began_s = time.thread_time()
        if sight.pipeline is not None:
            if is_new:
                self._document = document_parts(pipeline_document(sight.pipeline))
        else:
            self._draw_study(next(iter(sight.studies.values())).data, is_new=is_new)
        if is_new:
            self._is_stale = False
            used_s = time.thread_time() - began_s
            self._rests_until_s = time.monotonic() + used_s / _DOCUMENT_SHARE

    def _draw_study(self, data: StudyData, *, is_new: bool) -> None:
        if is_new:
            self._quick = quick_document(data)
            self._slow.want(data)
        number, slow = self._slow.latest()
        if self._quick is not None and (is_new or number != self._slow_drawn):
            self._slow_drawn = number
            self._document = document_parts(study_document(self._quick, slow))


class SlowDrawing:
    """Draws a study's slow sections in a thread of its own, for a small share of a core.

    Args:
        wanted: is set while a page is open.
        ended: is set when the command ends.
    """

    def __init__(self, wanted: threading.Event, ended: threading.Event) -> None:
        self._wanted, self._ended = wanted, ended
        self._lock = threading.Lock()
        self._due, self._hurries = threading.Event(), threading.Event()
        self._data: StudyData | None = None
        self._made: tuple[int, Mapping[str, Section]] = (0, {})

    def want(self, data: StudyData) -> None:
        """Have the sections drawn of this data.

        They are when they have rested, or at once if the study has ended.
        """
        with self._lock:
            self._data = data
        self._due.set()
        if data.ended is not None:
            self._hurries.set()

    def latest(self) -> tuple[int, Mapping[str, Section]]:
        """Return how often the sections were drawn, and the latest."""
        with self._lock:
            return self._made

    def run(self) -> None:
        while not self._ended.is_set():
            self._due.wait()
            self._wanted.wait()
            self._due.clear()
            self._hurries.clear()
            with self._lock:
                data = self._data
            if data is None:
                continue
            began_s = time.thread_time()
            made = slow_sections(data)
            with self._lock:
                self._made = self._made[0] + 1, made
            used_s = time.thread_time() - began_s
            self._hurries.wait(used_s * (1 / _SLOW_SHARE - 1))

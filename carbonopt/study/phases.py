"""Divides a trial's energy into phases and stages.

The work that a script does after its last step is kept apart from its training.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from carbonopt.core.trial import TRIAL_PHASES, Phase, Stage
from carbonopt.energy.meter import Meter
from carbonopt.energy.meter_reading import Reading

# Shortest work that counts as a stage of its own if only the meter's readings, which are 0.05 s
# apart, say how long it took.
SHORTEST_S = 0.1
# Interval and largest number of the readings that are kept after a step. The next step is reported
# within 0.5 s of its end, or later if it is a longer one.
_READINGS_EVERY_S = 0.1
_MOST_READINGS = 16


@dataclass
class TrialPhases:
    """The phases and stages of one trial, with the energy of each.

    A user's script reports its steps, but not what it does between them. The time between two steps
    counts as training. The time after the last step does not, whatever total the script has
    reported; it is moved to another stage at the end.
    """

    meter: Meter
    phase: Phase = Phase.SETUP
    stage: Stage = Stage.IMPORTS
    stages: dict[Stage, dict[str, float]] = field(default_factory=dict)  # fields of StageCost
    _closed_at_s: float = field(init=False)  # end of the last stage that has ended
    _closed_kwh: float = 0.0  # energy of the stages that have ended
    # Durations of the stages that have ended since the meter last had a new reading.
    _unread_s: dict[Stage, float] = field(default_factory=dict)
    _has_stepped: bool = False
    # Readings of TRAIN, first at the last step that was reported, then since.
    _readings: list[Reading] = field(default_factory=list)
    _seen: tuple[Phase, Reading] = field(init=False)  # the phase at the last look, and its reading
    # The reading that the last step was dated by, until the script names what it did since.
    _dated_by: Reading | None = None
    # Start of what still counts for the open phase.
    _counted_from: Reading = field(default_factory=Reading)
    # Work after the last step so far, in the windows of its stage that have ended.
    _after: list[Reading] = field(default_factory=list)
    _after_from: Reading = field(default_factory=Reading)  # start of the open one of these windows
    # The phase and the stage in which the script waited for its last answer, with its readings at
    # the phase's begin and when the study heard of it.
    _asked: tuple[Phase, Stage, Reading, Reading] | None = None
    _waited_s: float = 0.0  # time of that wait which no reading has shown so far
    # The last standstill: when it was noticed, its phase and stage, and what counted as GAP.
    _stood_still: tuple[float, Phase, Stage, Reading] | None = None

    def __post_init__(self) -> None:
        looked_s = time.monotonic()  # as in `enter`: the meter looks at the clock first
        self._seen = self.phase, self.meter.running(self.phase)
        self._closed_at_s = looked_s - self._seen[1].duration_s

    @property
    def train_kwh(self) -> float:
        """The energy of the training so far, including the work after its last step."""
        return self.meter.running(Phase.TRAIN).total_kwh

    @property
    def spent_kwh(self) -> float:
        """The energy of all of the trial's phases so far."""
        return math.fsum(self.meter.running(phase).total_kwh for phase in TRIAL_PHASES)

    @property
    def stepped_kwh(self) -> float:
        """The energy of the training up to the last step that was reported."""
        return self._readings[0].total_kwh if self._readings else 0.0

    def enter(self, phase: Phase, stage: Stage | None = None) -> None:
        """Enter a phase, and the given stage or else the one that the phase begins with."""
        if phase is self.phase:
            if stage not in (None, self.stage):
                self.begin(stage)
            return
        before = self.meter.running(phase)
        # The meter looks at the clock first, then reads, which takes long on a busy machine. The
        # stage before ends where the phase begins, so that the stages of a phase add up to it.
        begun_s = time.monotonic()
        self.meter.enter(phase)
        self._leave_wait_out()
        self._waited_s = 0.0
        self.phase, self._dated_by = phase, None
        self._counted_from = self.meter.running(phase)
        spent = [self.meter.running(each) for each in TRIAL_PHASES if each is not phase]
        spent += [before] if phase in TRIAL_PHASES else []
        self._begin(stage or self.usual(phase), begun_s, spent)

    def usual(self, phase: Phase) -> Stage:
        """Return the stage with which a phase begins."""
        training = Stage.STEPS if self._has_stepped else Stage.COMPILE
        usual = {Phase.TRAIN: training, Phase.EVAL: Stage.EVALUATION, Phase.SETUP: Stage.TEARDOWN}
        return usual.get(phase, self.stage)

    def begin(self, stage: Stage) -> None:
        """Begin a stage of the same phase now."""
        spent = [self.meter.running(phase) for phase in TRIAL_PHASES]
        self._begin(stage, time.monotonic(), spent)

    def cut(self) -> tuple[dict[Phase, Reading], dict[Stage, dict[str, float]]]:
        """Return the readings of the trial's phases and its stages, both as they are now.

        The stage goes on. Its part so far counts as ended, so that the stages add up.
        """
        readings = {phase: self.meter.running(phase) for phase in TRIAL_PHASES}
        self._begin(self.stage, time.monotonic(), list(readings.values()))
        return readings, {stage: dict(cost) for stage, cost in self.stages.items()}

    def _begin(self, stage: Stage, at_s: float, spent: Sequence[Reading]) -> None:
        """Begin a stage, at that time and after these readings of the trial's phases.

        The stage before gets all the energy since it began, so that stages add up to the trial.
        """
        spent_kwh = math.fsum(reading.total_kwh for reading in spent)
        self._close(at_s - self._closed_at_s, max(0.0, spent_kwh - self._closed_kwh))
        self._closed_at_s = at_s
        # A later reading may be lower, where it shows that other work kept the trial waiting. Then
        # the next stage gets less.
        self._closed_kwh = max(spent_kwh, self._closed_kwh)
        if Stage.AFTER in (self.stage, stage):
            setup = self.meter.running(Phase.SETUP)
            if self.stage is Stage.AFTER:
                self._after.append(setup.part_since(self._after_from))
            self._after_from = setup
        self.stage = stage
        self._has_stepped |= stage is Stage.STEPS

    def _close(self, duration_s: float, energy_kwh: float) -> None:
        """Add time and energy to the stage that ends.

        Stages that were too short for a reading share the energy of the next one by their time.
        """
        whole_s = math.fsum([duration_s, *self._unread_s.values()])
        if energy_kwh <= 0.0 or whole_s <= 0.0:
            if 0.0 < duration_s < SHORTEST_S:  # in a longer stage without energy nothing ran
                self._unread_s[self.stage] = self._unread_s.get(self.stage, 0.0) + duration_s
            self._add(self.stage, duration_s, energy_kwh)
            return
        for stage, unread_s in self._unread_s.items():
            self._add(stage, 0.0, energy_kwh * unread_s / whole_s)
        self._add(self.stage, duration_s, energy_kwh * duration_s / whole_s)
        self._unread_s.clear()

    def _add(self, stage: Stage, duration_s: float, energy_kwh: float) -> None:
        before = self.stages.setdefault(stage, {"duration_s": 0.0, "energy_kwh": 0.0})
        before["duration_s"] += duration_s
        before["energy_kwh"] += energy_kwh

    def stepped(self, ago_s: float) -> None:
        """Note that a step of the script ended so many seconds ago."""
        if self.phase is not Phase.TRAIN:
            return
        now = self._dated_by = self.meter.running(Phase.TRAIN)
        ended_at_s = now.duration_s - ago_s
        earlier = next(
            (one for one in reversed(self._readings) if one.duration_s <= ended_at_s),
            self._counted_from,
        )
        later = next((one for one in self._readings if one.duration_s > ended_at_s), now)
        length_s = later.duration_s - earlier.duration_s
        share = (
            min(1.0, max(0.0, ended_at_s - earlier.duration_s) / length_s) if length_s > 0 else 1.0
        )
        at_step = earlier + later.part_since(earlier, share)
        self._readings = [
            at_step,
            *(one for one in self._readings if one.duration_s > at_step.duration_s),
        ]

    def look(self) -> None:
        """Read the meter between events, so that later steps can be dated among the readings."""
        self._leave_wait_out()
        self._seen = self.phase, self.meter.running(self.phase)
        if self.phase is Phase.TRAIN and self._readings and len(self._readings) < _MOST_READINGS:
            now = self.meter.running(Phase.TRAIN)
            if now.duration_s - self._readings[-1].duration_s >= _READINGS_EVERY_S:
                self._readings.append(now)

    def stand_still(self, share: float) -> None:
        """Count a share of the energy since the last look as GAP, because the trial did not run."""
        phase, before = self._seen
        if phase is self.phase:
            part = self.meter.running(phase).part_since(before, share)
            self.meter.move(part, phase, Phase.GAP)
            self._closed_at_s += part.duration_s
            self._stood_still = time.monotonic(), phase, self.stage, part

    def answered(self) -> None:
        """Note that a script's message is answered now, or was a moment ago, in the open phase."""
        self._asked = self.phase, self.stage, self._counted_from, self._seen[1]

    def waited(self, seconds: float) -> None:
        """Count the time for which a script waited for its last answer as GAP.

        The study worked meanwhile, so it is neither training nor evaluation. Waits of the set-up
        and of the work after the training stay there.
        """
        self._waited_s += max(0.0, seconds - self._waited_in_standstill_s(seconds))
        self._leave_wait_out()
        if self._asked is not None and self._asked[0] is not self.phase:
            self._waited_s = 0.0

    def _waited_in_standstill_s(self, seconds: float) -> float:
        """Return for how long of its last wait a script has counted as standing still.

        Only the study was stopped then: the script worked, and after that it waited. A share of all
        energy is more than what its wait used, so that what an idle machine would not have used
        counts for the work again.
        """
        if self._stood_still is None:
            return 0.0
        noticed_s, phase, stage, part = self._stood_still
        self._stood_still = None
        if seconds <= time.monotonic() - noticed_s:
            return 0.0  # the wait began after it
        worked = part.without(part.as_idle())
        self.meter.move(worked, Phase.GAP, phase)
        if phase is not self.phase:
            self._add(stage, 0.0, worked.total_kwh)
            self._closed_kwh += worked.total_kwh
        return part.duration_s

    def _leave_wait_out(self) -> None:
        """Take the last wait for an answer out of its phase, as far as the readings cover it."""
        if self._asked is None or self._waited_s <= 0.0:
            return
        phase, stage, begun, before = self._asked
        now = self.meter.running(phase)
        if phase is not self.phase and now.duration_s - before.duration_s < self._waited_s:
            before = begun  # the study heard of it late
        length_s = now.duration_s - before.duration_s
        if phase not in (Phase.TRAIN, Phase.EVAL) or length_s <= 0.0:
            return
        part = now.part_since(before, min(1.0, self._waited_s / length_s))
        self.meter.move(part, phase, Phase.GAP)
        self._waited_s -= part.duration_s
        if phase is self.phase:
            self._closed_at_s += part.duration_s
            del self._readings[1:]
        else:
            # What the stage lacks is taken from the one that follows.
            has = self.stages.get(stage, {"duration_s": 0.0, "energy_kwh": 0.0})
            left_s = min(part.duration_s, has["duration_s"])
            left_kwh = min(part.total_kwh, has["energy_kwh"])
            self._add(stage, -left_s, -left_kwh)
            self._closed_at_s += part.duration_s - left_s
            self._closed_kwh -= left_kwh

    def claim(self, phase: Phase, stage: Stage) -> None:
        """Move earlier work to a stage that a script reports after the stage has begun.

        While the trial trains, the stage takes the work since the last step, or since the last
        change of phase, out of the training. Later, a stage of the training shows that the script
        went on after the end that it had announced: all that counted as work after the training
        becomes training again.

        If the script has just dated its last step, that date says how long the work was. Then even
        the shortest work is moved.
        """
        if self.phase is Phase.TRAIN:
            begin = max(
                [self._counted_from, *self._readings[:1]], key=lambda reading: reading.duration_s
            )
            self._take_since(begin, phase, stage, self._dated_by)
            self._dated_by = None
        elif phase is Phase.TRAIN:
            self._train_with_after(stage)

    def _train_with_after(self, stage: Stage) -> None:
        """Count all work after the training as a stage of the training, which goes on."""
        self.begin(self.stage)  # adds to the stage what it has used so far
        for part in self._after:
            self.meter.move(part, Phase.SETUP, Phase.TRAIN)
        self._after.clear()
        self._after_from = self.meter.running(Phase.SETUP)
        if after := self.stages.pop(Stage.AFTER, None):
            self._add(stage, after["duration_s"], after["energy_kwh"])
        if unread_s := self._unread_s.pop(Stage.AFTER, 0.0):
            self._unread_s[stage] = self._unread_s.get(stage, 0.0) + unread_s

    def end(self) -> None:
        """Count the work after the last step as no training, over all windows of the phase.

        Nothing changes if no step was reported.
        """
        if self._readings:
            self._take_since(self._readings[0], Phase.SETUP, Stage.AFTER)

    def join_as_training(self, whole: Reading) -> None:
        """Count all stages as training steps, because the script has none of carbonopt's lines."""
        self.stages = {Stage.STEPS: {"duration_s": whole.duration_s, "energy_kwh": whole.total_kwh}}

    def _take_since(
        self, begin: Reading, phase: Phase, stage: Stage, end: Reading | None = None
    ) -> None:
        """Count the training between two readings for another phase and stage.

        Args:
            end: None: now.
        """
        part = (end or self.meter.running(Phase.TRAIN)).part_since(begin)
        if part.duration_s < (SHORTEST_S if end is None else 1e-9):
            return
        self.meter.move(part, Phase.TRAIN, phase)
        self.begin(self.stage)  # adds to the stage what it has used so far
        taken = {"duration_s": part.duration_s, "energy_kwh": part.total_kwh}
        # Taken from the latest stage first, and never more than a stage has.
        for trained in (Stage.STEPS, Stage.COMPILE):
            has = self.stages.get(trained, {})
            for name, amount in has.items():
                moved = min(amount, taken[name])
                has[name] -= moved
                taken[name] -= moved
        self._add(
            stage, part.duration_s - taken["duration_s"], part.total_kwh - taken["energy_kwh"]
        )
        self._counted_from = begin
        del self._readings[1:]
        self._seen = self.phase, self.meter.running(self.phase)

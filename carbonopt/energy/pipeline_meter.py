"""One meter that the studies of a pipeline use one after the other."""

import operator
from collections.abc import Callable, Mapping
from functools import reduce

from carbonopt.core.trial import TRIAL_PHASES, Phase
from carbonopt.energy.meter import Meter
from carbonopt.energy.meter_reading import Reading


class PipelineMeter:
    """One meter that studies share one after the other, and that also measures the pauses between.

    `for_step` returns the shared meter as one study uses it.
    """

    def __init__(self) -> None:
        self._meter: Meter | None = None  # opened by the first study
        # GAP and OTHER of the pauses that are over.
        self._between: tuple[dict[Phase, Reading], ...] = ()
        self._gaps_before = Reading()  # GAP that the last study has accounted for

    def for_step(self, opened: Callable[[], Meter]) -> Meter:
        """Return the shared meter for a study, which uses it until it closes it.

        `opened` opens the meter, for the first study.
        """
        if self._meter is None:
            self._meter, began = opened(), None
        else:
            self._meter.enter(Phase.PREPARE)
            taken = self._meter.take(Phase.GAP, Phase.OTHER)
            self._between += ({**taken, Phase.GAP: taken[Phase.GAP].since(self._gaps_before)},)
            began = self._meter.outer()
        return _StepMeter(self._meter, began, self._taken_back)

    def _taken_back(self, accounted: Mapping[Phase, Reading]) -> None:
        """Go on in the pause after a study, whose parts were last read as `accounted`.

        The energy that the study used after that reading is reported nowhere by the study, so
        that it counts as the pause's.
        """
        assert self._meter is not None
        self._meter.enter(Phase.GAP)
        used = self._meter.take(Phase.PREPARE, Phase.OTHER, *TRIAL_PHASES)
        nothing = Reading(objective=used[Phase.PREPARE].objective)
        later = {
            phase: used[phase].since(accounted.get(phase, nothing))
            for phase in (Phase.PREPARE, Phase.OTHER)
        }
        self._between += ({Phase.GAP: later[Phase.PREPARE], Phase.OTHER: later[Phase.OTHER]},)
        self._gaps_before = accounted.get(Phase.GAP, nothing)

    def between(self, *, in_use: bool = False) -> Reading:
        """Return this command's own energy between studies so far.

        `in_use` says whether a study uses the meter now.
        """
        return self._paused(Phase.GAP, in_use=in_use)

    def others_between(self, *, in_use: bool = False) -> Reading:
        """Return the energy that other work used on the cores between studies so far."""
        return self._paused(Phase.OTHER, in_use=in_use)

    def _paused(self, phase: Phase, *, in_use: bool) -> Reading:
        assert self._meter is not None
        pauses = [pause[phase] for pause in self._between]
        if not in_use:
            now = self._meter.running(phase)
            pauses.append(now.since(self._gaps_before) if phase is Phase.GAP else now)
        return reduce(operator.add, pauses, Reading(objective=self._meter.outer().objective))

    def outer(self) -> Reading:
        assert self._meter is not None
        return self._meter.outer()

    @property
    def runs(self) -> bool:
        """True if any study has used the meter."""
        return self._meter is not None

    def close(self) -> None:
        if self._meter is not None:
            self._meter.close()


class _StepMeter:
    """The shared meter as one study uses it. Implements `Meter`."""

    def __init__(
        self,
        meter: Meter,
        began: Reading | None,
        taken_back: Callable[[Mapping[Phase, Reading]], None],
    ) -> None:
        self.energy_source, self.models, self.idle = meter.energy_source, meter.models, meter.idle
        self.enter, self.use, self.running, self.take = (
            meter.enter,
            meter.use,
            meter.running,
            meter.take,
        )
        self.move = meter.move
        self._meter, self._began, self._taken_back = meter, began, taken_back
        self._accounted: dict[Phase, Reading] = {}
        self._ended: Reading | None = None

    def outer(self) -> Reading:
        if self._ended is not None:
            return self._ended
        return self._own(self._meter.outer())

    def parts_and_outer(self, *phases: Phase) -> tuple[dict[Phase, Reading], Reading]:
        parts, whole = self._meter.parts_and_outer(*phases)
        self._accounted |= parts
        return parts, self._own(whole)

    def _own(self, whole: Reading) -> Reading:
        return whole if self._began is None else whole.since(self._began)

    def close(self) -> None:
        if self._ended is None:
            self._ended = self.outer()
            self._taken_back(self._accounted)

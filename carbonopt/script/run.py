"""One training as the study follows it."""

import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

from carbonopt.core import events
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import quality_of
from carbonopt.core.reported import evaluation, whole
from carbonopt.core.trial import EvalPoint, Phase, Stage
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.train.client import Speaker
from carbonopt.train.cpu_wait import CpuWait
from carbonopt.train.failures import ending


def in_study() -> bool:
    """Whether a study runs this script."""
    return events.QUALITY in os.environ


class Run:
    """One training, as the study follows it. To be used on every rank, since all of them wait for each other where a
    phase changes. Outside a study its methods do nothing.

    Args:
        total_steps: optimizer steps of the whole training. None: as `workload.steps` has it in the study file.
    """

    def __init__(self, total_steps: int | None = None) -> None:
        self._total_steps = 0
        self._step, self._phase = 0, Phase.SETUP
        self.has_reported, self._cores = False, CpuWait()
        self._owner = os.getpid() if in_study() else None
        if self._is_followed:
            with self._refusals_told():
                self._total_steps = self._checked_total(total_steps)
            self.enter(Phase.TRAIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._failed(error)
        elif error is None:
            self.end()

    @property
    def _is_followed(self) -> bool:
        """By a study, which follows the script's own process alone and none that this one forks."""
        return self._owner == os.getpid()

    @property
    def steps(self) -> int:
        """Made so far."""
        return self._step

    @staticmethod
    def _checked_total(total_steps: int | None) -> int:
        given = total_steps if total_steps is not None else int(os.environ[events.TOTAL_STEPS] or 0)
        if given == 0:
            raise BadInput("carbonopt.script.run needs total_steps, or the study file workload.steps.")
        if _world_size() != (launched := int(os.environ[events.RANKS])):
            ranks = f"the launch has {launched}, but WORLD_SIZE is {_world_size()}"
            how = "let its launcher start {world_size} of them, or carbonopt do it (`python FILE`)"
            raise BadInput(f"a script must run on the ranks of the launch: {ranks}; {how}.")
        if _world_size() > 1 and _ranks() is None:
            raise BadInput("torch.distributed must be initialised before carbonopt.script.run, but isn't.")
        if (known := _ranks()) is not None:
            known.check_devices()
        return whole("total_steps", given, 1)

    def step(self, step: int | None = None) -> None:
        """After each optimizer step, with its number from 1; None: the next one.

        Raises:
            BadInput: if the number is none, below the last one, or above the total steps.
        """
        if not self._is_followed:
            return
        with self._refusals_told():
            self._step = self._step + 1 if step is None else whole("run.step's number", step, self._step)
            if self._step > self._total_steps:
                must = f"a training must have total_steps optimizer steps at most: {self._total_steps}"
                raise BadInput(f"{must}, but this is step {self._step}; give carbonopt.script.run those of all epochs.")
        if (speaker := _speaker()) is None:
            return
        if self._step == 1:
            if (ranks := _ranks()) is not None:
                ranks.wait_for_device()
            speaker.stage(Stage.STEPS)
        # After an evaluation its report tells how long cores were waited for; a stop before the first needs it as well.
        speaker.progress(self._step, self._total_steps, None if self.has_reported else self._cores.end)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around what evaluates the model: its energy is not training's. Within another one it does nothing."""
        if self._phase is Phase.EVAL:
            yield
            return
        self.enter(Phase.EVAL)
        try:
            yield
        except Exception:
            if _world_size() == 1:  # the script may go on; of several ranks not all may have come here
                self.resume()
            raise
        self.resume()

    def report(self, /, *, count: int | None = None, **qualities: float) -> bool:
        """Reports an evaluation; True: the study says stop, and every rank is told the same.

        Args:
            count: of examples or tokens that the quality is a mean over. None: not known.
            qualities: by name, the study's target among them: `accuracy=0.93`. Shares are from 0 to 1.

        Raises:
            BadInput: if the target's quality is not among them or can't have such a value, or before the first step.
        """
        if not self._is_followed:
            return False
        quality = quality_of(os.environ[events.QUALITY], os.environ[events.DIRECTION])  # type: ignore[arg-type]
        with self._refusals_told():
            if self._step == 0:
                raise BadInput("a report must come after a step, but there was none; call run.step() after each one.")
            point = evaluation(quality, dict(qualities), count, self._step)
        stop = self._told(point)
        if self._step >= self._total_steps:
            self.end()
        return stop

    def resume(self) -> None:
        """After an evaluation: training goes on, unless all its steps are made."""
        if self._step < self._total_steps:
            self.enter(Phase.TRAIN)

    def end(self) -> None:
        """The training has ended: what comes now, such as saving the model, is no part of it."""
        if self._is_followed and self._step and (speaker := _speaker()) is not None:
            speaker.progress(self._step, self._total_steps, last=True)
        self.enter(Phase.SETUP)

    def enter(self, phase: Phase) -> None:
        """Changes what energy counts as; every rank's device is idle then."""
        if not self._is_followed or phase is self._phase:
            return
        ended, self._phase, ranks = self._phase, phase, _ranks()
        if ranks is not None:
            ranks.together()
        if ended is Phase.TRAIN:
            self._cores.end()
        if phase is Phase.TRAIN:
            self._cores.begin()
        if (speaker := _speaker()) is not None:
            speaker.phase(phase)
        if ranks is not None:
            ranks.together()

    def _told(self, point: EvalPoint) -> bool:
        ranks, stop, self.has_reported = _ranks(), False, True
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / BYTES_PER_GIB
        waited = self._cores.end() if self._phase is Phase.TRAIN else self._cores.share
        if ranks is not None:
            peak_gib = ranks.largest(ranks.peak_memory_gib())
            waited = None if waited is None else ranks.largest(waited)  # where one rank's kernel tells it, all do
        if (speaker := _speaker()) is not None:
            told = events.Evaluated(
                point=point, total_steps=self._total_steps, peak_memory_gib=peak_gib, cpu_wait_fraction=waited
            )
            stop = bool(speaker.evaluated(told))
        return stop if ranks is None else bool(ranks.largest(float(stop)))

    def refuse(self, sentence: str) -> None:
        """Raises BadInput with that sentence, which the study hears."""
        with self._refusals_told():
            raise BadInput(sentence)

    @contextmanager
    def _refusals_told(self) -> Iterator[None]:
        """What the script did wrong the study hears before the script ends of it."""
        try:
            yield
        except BadInput as error:
            self._failed(error)
            raise

    def _failed(self, error: Exception) -> None:
        """Tells the study why, as far as it can be told better than by a log."""
        if self._is_followed and (speaker := _speaker()) is not None:
            kind, _, text = ending(error)
            speaker.failed(kind, text)


def run(total_steps: int | None = None) -> Run:
    """To be called on every rank when model and optimizer are ready and the first step comes next: from here on energy
    counts as training. With `with` around the loop it counts no more where that ends, be it early. Arguments as `Run`.

    Raises:
        BadInput: if there are no total steps, or the ranks aren't those of the launch.
    """
    return Run(total_steps)


@cache
def _speaker() -> Speaker | None:
    """Rank 0's connection to the study; None on the other ranks."""
    if _rank() > 0:
        return None
    if events.CHANNEL_PATH not in os.environ:
        raise BadInput(
            "rank 0 must run on the first machine of the launch, where the study is heard, but runs elsewhere."
        )
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[events.CHANNEL_PATH])
    return Speaker(connection)


def _rank() -> int:
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)


def _ranks() -> Any:
    """What ranks do together, where the script uses PyTorch; None: there is one rank alone, on a CPU as far as is
    known, or PyTorch's ranks don't know each other yet."""
    if (torch := sys.modules.get("torch")) is None:
        return None
    if _world_size() > 1 and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from carbonopt.train import ranks

    return ranks

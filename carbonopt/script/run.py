"""A training of a user's own script that a study follows."""

from __future__ import annotations

import atexit
import builtins
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from carbonopt.core import channel
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import quality_of
from carbonopt.core.script_reports import Reported, evaluation, whole
from carbonopt.core.sockets import socket_address
from carbonopt.core.states import Phase, Stage
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.train.client import Speaker
from carbonopt.train.cpu_wait import CpuWait
from carbonopt.train.failures import ending

if TYPE_CHECKING:
    from typing import Self


def in_study() -> bool:
    """Return True if a study runs this script, and False if you run it yourself."""
    return channel.QUALITY in os.environ


class Run:
    """A training that the study follows.

    Every rank has to make the same calls, since all ranks wait for each other where a phase
    changes. Outside a study its methods do nothing. Threads of a rank may share it: their calls
    wait for each other. The thread that makes the steps has to report, or the main thread.

    Args:
        total_steps: number of optimizer steps of the whole training, from 1 on. None: the study
            file's `workload.steps`.
        world_size: number of ranks that train together, by the script's library. None: by PyTorch
            and accelerate.

    Raises:
        BadInput: if there are no total steps, if the script has begun a training before, if the
            ranks are not those of the launch, or if there are several and torch.distributed is not
            initialised.
    """

    _process: int | None = None  # the process that has begun a training which the study follows
    # Each call of the study must have its own answer. Not in __init__: callbacks are copied.
    _lock = threading.RLock()

    def __init__(self, total_steps: int | None = None, world_size: int | None = None) -> None:
        self._total_steps = 0
        self._step, self._phase = 0, Phase.SETUP
        self._has_stepped = False  # a training that goes on begins with a later step than 1
        self._stage: Stage | None = None  # None: the usual stage of the phase
        self._block: str | None = None  # the block that the script is in
        self._exited: SystemExit | None = None  # left the `with` block with another code than 0
        self._stepper: threading.Thread | None = None  # the thread that made the last step
        self.has_reported, self.has_ended = False, False
        self._cores = CpuWait()
        self._owner = os.getpid() if in_study() else None
        if self._is_followed:
            with self._refusals_sent():
                self._check_first()
                self._total_steps = self._checked_total(total_steps)
                _check_ranks(world_size)
            atexit.register(self._at_exit)
            self.enter(Phase.TRAIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # An error may be the script's way to stop early. `_at_exit` tells if it ends the process.
        if error is None:
            self.end()
        elif isinstance(error, SystemExit) and error.code:
            self._exited = error

    @property
    def _is_followed(self) -> bool:
        """True if a study follows this process.

        A study follows the script's own process, and none that the script forks.
        """
        return self._owner == os.getpid()

    @property
    def steps(self) -> int:
        """The number of steps made so far."""
        return self._step

    @property
    def is_training(self) -> bool:
        """True if energy counts as training now."""
        return self._phase is Phase.TRAIN

    @staticmethod
    def _check_first() -> None:
        """Refuse a second training in the same script.

        The quality would be that of the last training, but the energy that of all.
        """
        if Run._process == os.getpid():
            instead = (
                "give the callback to one Trainer, or follow several, such as folds, by one"
                " carbonopt.script.run"
            )
            mean = "with total_steps of all and one report of their mean at the end"
            raise BadInput(
                f"a script must have one training, but begins a second one; {instead}, {mean}."
            )
        Run._process = os.getpid()

    @staticmethod
    def _checked_total(total_steps: int | None) -> int:
        given = (
            total_steps if total_steps is not None else int(os.environ[channel.TOTAL_STEPS] or 0)
        )
        if given == 0:
            raise BadInput(
                "the number of optimizer steps must be known before the first one; give"
                " carbonopt.script.run total_steps, a trainer without an end max_steps, or the"
                " study file workload.steps."
            )
        return whole("total_steps", given, 1)

    def check_begin(self, step: int) -> None:
        """Refuse a training whose first step has another number than 1.

        A later attempt of a trial with `{checkpoint_dir}` may go on: it counts from that step.

        Raises:
            BadInput: if it goes on from a checkpoint, whose energy nobody measured in this trial.
        """
        if self._is_followed and step > 1 and channel.CONTINUES in os.environ:
            self._step = max(self._step, step - 1)
        elif self._is_followed and step > 1:
            must = "a trial must train from its first step, but its training begins at step"
            how = (
                "let it begin without a checkpoint, or save it into {checkpoint_dir}, and call"
                " run.step() after each optimizer step"
            )
            self.refuse(f"{must} {step}; {how}.")

    def check_metric(self, metric: str, quality: str) -> None:
        """Refuse a callback whose metric is not the target's quality.

        It is called before the training, so that the error doesn't wait for the first evaluation.

        Args:
            metric: the metric that the callback was given.
            quality: the name under which its values will be reported.

        Raises:
            BadInput: if the target is another quality.
        """
        if self._is_followed and quality != (target := os.environ[channel.QUALITY]):
            must = (
                f"a callback must report {target}, the quality of the target, but is given"
                f" {metric!r}"
            )
            self.refuse(
                f"{must}, which reports {quality}; give it the metric of the target, or change the"
                " target."
            )

    def step(self, step: int | None = None) -> None:
        """Count an optimizer step; call this after each one.

        Steps beyond `total_steps` are counted, too, and the report warns of them. A step after
        `end` goes on with the training: what the script did since the step before, except
        evaluations and checkpoints, is training.

        Args:
            step: the number of the step, from 1 on. None: the next one.

        Raises:
            BadInput: if the number is no whole number, below the last one, or not 1 at first; or if
                the step is made within the block of an evaluation or a checkpoint, whose energy is
                not training's.
        """
        if self._is_followed:
            with self._lock:
                self._count(step)

    def _count(self, step: int | None) -> None:
        """Count an optimizer step; see `step`."""
        if self._block is not None:
            self.refuse(
                f"a step must be made outside `with {self._block}`, but is made within; end the"
                " block before."
            )
        is_first, self._has_stepped = not self._has_stepped, True
        self._stepper = threading.current_thread()
        with self._refusals_sent():
            number = (
                self._step + 1
                if step is None
                else whole("run.step's number", step, max(1, self._step))
            )
        if is_first:
            self.check_begin(number)
        if number > self._total_steps or not self.is_training:
            self._train_on(number)
        self._step = number
        is_last = number == self._total_steps
        if (speaker := _speaker()) is None:
            return
        if (is_first or is_last) and (ranks := _ranks()) is not None:
            ranks.wait_for_device()
        if is_first:
            speaker.stage(Stage.STEPS)
        # After an evaluation, its report has the time for which cores were waited for. A trial that
        # is stopped before the first evaluation needs that, too.
        speaker.progress(
            number, self._total_steps, None if self.has_reported else self._cores.end, last=is_last
        )

    def _train_on(self, number: int) -> None:
        """Go on with a training whose end was said, or that makes more steps than were announced.

        The study's report warns of the second case, more steps than announced.
        """
        self._total_steps = max(number, self._total_steps)
        self.has_ended = False
        if not self.is_training:
            self.enter(Phase.TRAIN, since_step=True)

    def evaluation(self) -> AbstractContextManager[None]:
        """Return a context manager for the evaluation of the model, whose energy is not training's.

        Within the block of another evaluation or checkpoint it does nothing.
        """
        return self._aside(Phase.EVAL, Stage.EVALUATION)

    def saving(self) -> AbstractContextManager[None]:
        """Return a context manager for the saving of a checkpoint, whose energy is not training's.

        Within the block of another evaluation or checkpoint it does nothing.
        """
        return self._aside(Phase.SETUP, Stage.SAVING)

    @contextmanager
    def _aside(self, phase: Phase, stage: Stage) -> Iterator[None]:
        if self._stage in (Stage.EVALUATION, Stage.SAVING):
            yield
            return
        self.enter(phase, stage)
        outer, self._block = self._block, f"run.{stage.value}()"
        try:
            yield
        except Exception:
            # The script may go on. With several ranks, not all may have come here.
            if _world_size() == 1:
                self.resume()
            raise
        finally:
            self._block = outer
        self.resume()

    def report(self, /, *, count: int | None = None, **qualities: float) -> bool:
        """Report an evaluation, and return whether the training has to stop.

        Before the first step the report is the quality at the start. What the script did since its
        last step counts as evaluation. With several ranks, the values of rank 0 count.

        Args:
            count: number of examples or tokens that the quality is a mean over. None: not known.
            qualities: values by name, with the study's target among them, such as `accuracy=0.93`.
                Each is a number or a tensor of one element. Shares are from 0 to 1, not percents.
                NaN or infinity says that the training diverged.

        Returns:
            True if the study stops the trial; all ranks get the same answer. Outside a study False.

        Raises:
            BadInput: if the target's quality is not among the qualities or can't have such a value,
                if another quality is no number, if `count` is no whole number from 1 on, or if
                another thread makes the steps meanwhile.
        """
        if not self._is_followed:
            return False
        self._check_thread()
        name, direction = os.environ[channel.QUALITY], os.environ[channel.DIRECTION]
        quality = quality_of(name, direction)  # type: ignore[arg-type]
        with self._lock:
            with self._refusals_sent():
                point = evaluation(quality, dict(qualities), count, self._step)
            stop = self._send(point)
            if self._step >= self._total_steps and self._block is None:
                self.end()  # else the block ends, and `resume` with it
        return stop

    def _check_thread(self) -> None:
        """Refuse a report of a background thread while another thread makes the steps.

        All time since the last step would count as evaluation, although it was training, too. The
        main thread may report what it let another thread train.
        """
        thread, stepper = threading.current_thread(), self._stepper
        if thread in (stepper, threading.main_thread()) or stepper is None:
            return
        if stepper.is_alive():
            self.refuse(
                "an evaluation must be reported by the thread that trains, since time is either"
                f" training or evaluation, but {thread.name} reports while {stepper.name} makes the"
                " steps; evaluate between two steps, or wait for that thread and report the value"
                " that it returns."
            )

    def resume(self) -> None:
        """Go on with the training, or with what follows it if all its steps are made."""
        if self.has_ended or self._step >= self._total_steps > 0:
            self.enter(Phase.SETUP, Stage.AFTER)
        else:
            self.enter(Phase.TRAIN)

    def end(self) -> None:
        """Say that the training has ended.

        The energy of what follows, such as a test of the model, is not training's. A report after
        the last of the total steps, and the end of a `with` block of the run, do the same.
        """
        self.has_ended = True
        self.enter(Phase.SETUP, Stage.AFTER)

    def enter(self, phase: Phase, stage: Stage | None = None, *, since_step: bool = False) -> None:
        """Change what energy counts as; every rank's device is idle then.

        Args:
            phase: the phase that begins.
            stage: the stage that begins; None: the usual one of the phase.
            since_step: count everything since the last step, or since a phase that was announced
                after it, as this phase.
        """
        if self._is_followed:
            with self._lock:
                self._enter(phase, stage, since_step)

    def _enter(self, phase: Phase, stage: Stage | None, since_step: bool) -> None:
        if (phase, stage) == (self._phase, self._stage):
            return
        ended, self._phase, self._stage, ranks = self._phase, phase, stage, _ranks()
        if ranks is not None:
            ranks.together()
        if ended is Phase.TRAIN:
            self._cores.end()
        if phase is Phase.TRAIN:
            self._cores.begin()
        if (speaker := _speaker()) is not None:
            speaker.catch_up(again=since_step)
            speaker.phase(phase, stage, since_step=since_step)
            speaker.waited()
        if ranks is not None:
            ranks.together()

    def _at_exit(self) -> None:
        """Send the last step of a script that exits without having called `end`.

        That the process ends is sent, too, with the error that ends it: a shell may hide its exit
        code.
        """
        if self._is_followed and (speaker := _speaker()) is not None:
            with self._lock, suppress(OSError):  # the study has ended the trial
                speaker.catch_up()
                error = self._ended_by()
                kind, _, text = (None, 0, "") if error is None else ending(error)
                speaker.left(kind, text)

    def _ended_by(self) -> Exception | SystemExit | None:
        """Return the error that ends this process, as far as is known."""
        # An interactive shell keeps the errors of its inputs there, too.
        last = None if hasattr(builtins, "__IPYTHON__") else getattr(sys, "last_value", None)
        return last if isinstance(last, Exception) else self._exited

    def _send(self, point: Reported) -> bool:
        ranks, stop, self.has_reported = _ranks(), False, True
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / BYTES_PER_GIB
        waited = self._cores.end() if self._phase is Phase.TRAIN else self._cores.share
        if ranks is not None:
            peak_gib = ranks.largest(ranks.peak_memory_gib())
            # if one rank's kernel can tell it, all can
            waited = None if waited is None else ranks.largest(waited)
        if (speaker := _speaker()) is not None:
            speaker.catch_up(again=True)
            measured = {"peak_memory_gib": peak_gib, "cpu_wait_fraction": waited}
            stop = bool(speaker.evaluated(point=point, total_steps=self._total_steps, **measured))
            speaker.waited()
        return stop if ranks is None else bool(ranks.largest(float(stop)))

    def refuse(self, sentence: str) -> None:
        """Refuse what the script did, and tell the study why.

        Raises:
            BadInput: always, with that sentence.
        """
        with self._refusals_sent():
            raise BadInput(sentence)

    @contextmanager
    def _refusals_sent(self) -> Iterator[None]:
        """Send a BadInput of the block to the study before it ends the script."""
        try:
            yield
        except BadInput as error:
            self._failed(error)
            raise

    def _failed(self, error: Exception) -> None:
        """Tell the study why it refuses the script."""
        if self._is_followed and (speaker := _speaker()) is not None:
            kind, _, text = ending(error)
            with self._lock:
                speaker.failed(kind, text)


def run(total_steps: int | None = None) -> Run:
    """Begin the training that the study follows; from here on energy counts as training.

    Call it on every rank when model and optimizer are ready and the first step comes next. If
    `with` is used around the loop, energy stops counting as training at the end of the block, be it
    early.

    Args:
        total_steps: number of optimizer steps of the whole training, from 1 on, which are not micro
            batches. None: the study file's `workload.steps`.

    Raises:
        BadInput: if there are no total steps, if the script has begun a training before, if the
            ranks are not those of the launch, or if there are several and torch.distributed is not
            initialised.
    """
    return Run(total_steps)


@cache
def _speaker() -> Speaker | None:
    """Return rank 0's connection to the study; None on the other ranks."""
    if _rank() > 0:
        return None
    if channel.CHANNEL_PATH not in os.environ:
        raise BadInput(
            "rank 0 must run on the first machine of the launch, where the study is heard, but runs"
            " elsewhere."
        )
    connection = socket.socket(socket.AF_UNIX)
    with socket_address(os.environ[channel.CHANNEL_PATH]) as address:
        connection.connect(address)
    return Speaker(connection)


def _rank() -> int:
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)


def _check_ranks(world_size: int | None) -> None:
    """Check that the script's ranks are those of the launch and train together.

    Otherwise each rank would train a copy of its own.

    Args:
        world_size: the number of ranks by the script's library.

    Raises:
        BadInput: if they are not.
    """
    launched = int(os.environ[channel.RANKS])
    how = "let its launcher start {world_size} of them, or carbonopt do it (`python FILE`)"
    seen = {"WORLD_SIZE": _world_size(), "the Trainer's world size": world_size}
    if (torch := sys.modules.get("torch")) is not None and torch.distributed.is_available():
        is_initialized = torch.distributed.is_initialized()
        seen["torch.distributed's world size"] = (
            torch.distributed.get_world_size() if is_initialized else None
        )
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        seen["accelerate's num_processes"] = accelerate.PartialState._shared_state.get(
            "num_processes"
        )
    for name, ranks in seen.items():
        if ranks not in (None, launched):
            raise BadInput(
                f"a script must run on the ranks of the launch: there are {launched}, but {name} is"
                f" {ranks}; {how}."
            )
    if launched > 1 and _ranks() is None:
        raise BadInput(
            "torch.distributed must be initialised before carbonopt.script.run, but isn't."
        )
    if (known := _ranks()) is not None:
        known.check_devices()


def _ranks() -> Any:
    """Return the module of what ranks do together, where the script uses PyTorch.

    It is None where there is one rank alone, on a CPU as far as is known, or where PyTorch's ranks
    don't know each other yet.
    """
    if (torch := sys.modules.get("torch")) is None:
        return None
    if _world_size() > 1 and not (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    ):
        return None
    from carbonopt.train import ranks

    return ranks

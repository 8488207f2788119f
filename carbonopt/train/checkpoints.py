"""A trial's checkpoints: written aside, then renamed, and read again by a later attempt.

The study says from which checkpoint an attempt goes on, and removes the others: an attempt here
neither looks for one nor removes one. A checkpoint is a folder with a file of what all ranks share,
one of each rank's own, and a manifest that says what it is and how to detect damage.
"""

import errno
import hashlib
import os
import pickle
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import carbonopt
from carbonopt.core.errors import FULL, system_reason
from carbonopt.core.files import parsed_json, write_json
from carbonopt.spec.trial_spec import TrialCheckpoints, checkpoint_name
from carbonopt.train import ranks
from carbonopt.train.client import Speaker
from carbonopt.train.failures import reason
from carbonopt.train.imports import package_versions
from carbonopt.train.tasks.task import TrialRun
from carbonopt.train.training_state import TrainingState, UnknownState

_MANIFEST, _SHARED = "checkpoint.json", "shared.pt"
_CLOCK_LOOKS = 10  # so often at least is the clock looked at between two checkpoints


@dataclass(frozen=True)
class SavedTraining:
    """A checkpoint that was read on this rank: the step after which it was written, its state."""

    step: int
    shared: dict[str, Any]
    own: dict[str, Any]


class Checkpoints:
    """One rank's checkpoints of one attempt; all ranks make the same calls.

    Args:
        settings: The study's settings for this trial.
        run: The trial.
        state: The state of the training; None: it can't be taken, and nothing is written.
        speaker: On rank 0.
    """

    def __init__(
        self,
        settings: TrialCheckpoints,
        run: TrialRun,
        state: TrainingState | None,
        speaker: Speaker | None,
    ) -> None:
        self._settings, self._run, self._state = settings, run, state
        self._speaker = speaker
        self._folder = Path(settings.folder)
        self._clock = _Clock(settings.every_s)
        self._has_said = False  # that checkpoints can't be written, since the last that was

    def remark(self, text: str) -> None:
        """Tell the user something, on rank 0."""
        if ranks.rank() == 0:
            print(f"carbonopt: {text}.", flush=True)
        if self._speaker is not None:
            self._speaker.remark(text)

    def read(self) -> SavedTraining | None:
        """Return the checkpoint from which the attempt goes on; None: it begins with step 1.

        A checkpoint that can't be used on one rank is used on none.
        """
        step = self._settings.continue_from
        if step is None:
            return None
        saved, problem = None, None
        try:
            saved = self._read(step)
        except (OSError, ValueError, LookupError, TypeError, RuntimeError,
                pickle.UnpicklingError) as error:  # fmt: skip
            problem = reason(error)
        problems = [each for each in ranks.gathered(problem) if each is not None]
        if not problems:
            return saved
        self.remark(
            f"the checkpoint of step {step} can't be used ({problems[0]}); the trial begins again"
        )
        return None

    def restore(self, saved: SavedTraining) -> None:
        """Give the training the state of a checkpoint, and report it.

        `restore_random` has to follow, just before the first step.
        """
        assert self._state is not None
        self._state.restore(saved.shared, saved.own)
        if self._speaker is not None:
            self._speaker.continued(saved.step)

    def restore_random(self, saved: SavedTraining) -> None:
        """Let the training draw the random numbers that it drew after the checkpoint."""
        assert self._state is not None
        self._state.restore_random(saved.own)

    def begin(self, step: int) -> None:
        """Begin to count the time to the first checkpoint, after this step."""
        self._clock.begin(step)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step; the same on all ranks."""
        return self._state is not None and self._clock.is_due(step)

    def save(self, step: int) -> None:
        """Write a checkpoint of the training after this step, and report it.

        If it can't be written, the earlier one stays, and the trial goes on. That is said once,
        until one is written again.
        """
        part = self._folder / f".{checkpoint_name(step)}.part"
        if ranks.rank() == 0:
            shutil.rmtree(part, ignore_errors=True)  # an earlier attempt may have left it
        ranks.together()
        digests: dict[str, str] = {}
        problem, is_known = None, True
        try:
            digests = self._write(part)
        except UnknownState as error:
            problem, is_known = f"{error}; the trial goes on", False
        except (OSError, RuntimeError) as error:  # torch turns a full disk into RuntimeError
            problem = self._unwritable(error)
        written = ranks.gathered((problem, is_known, digests))
        problems = [each for each, _, _ in written if each is not None]
        if ranks.rank() == 0 and not problems:
            problems = self._finish(part, step, [digests for *_, digests in written])
        if problems and ranks.rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
            if not self._has_said:
                self.remark(f"no checkpoint after step {step}: {problems[0]}")
        self._has_said = bool(problems)
        if not all(is_known for _, is_known, _ in written):
            self._state = None  # it would be in vain each time
        self.begin(step)

    def _finish(self, part: Path, step: int, digests: list[dict[str, str]]) -> list[str]:
        """Make a written checkpoint complete; return what is wrong, if anything is."""
        files = {name: digest for of_rank in digests for name, digest in of_rank.items()}
        try:
            write_json(part / _MANIFEST, {"step": step, "files": files, **self._identity()})
            target = self._folder / checkpoint_name(step)
            shutil.rmtree(target, ignore_errors=True)  # of an earlier attempt; nobody needs it
            part.rename(target)
            _sync(self._folder)
        except OSError as error:
            return [self._unwritable(error)]
        if self._speaker is not None:
            self._speaker.saved(step)
        return []

    def _unwritable(self, error: OSError | RuntimeError) -> str:
        """Say why a checkpoint can't be written, and what follows."""
        of_system = _system_error(error)
        if of_system is None:
            why = reason(error)
        elif of_system.errno == errno.EDQUOT:
            why = f"the quota of the disk of {self._folder} is used up"
        elif of_system.errno in FULL:
            why = f"the disk of {self._folder} is full{self._free()}"
        else:
            why = system_reason(of_system)
        return f"{why}; the trial goes on, and each further checkpoint is tried"

    def _free(self) -> str:
        """Say how much space the disk has left, if that is known."""
        try:
            return f" ({shutil.disk_usage(self._folder).free / 1e6:,.1f} MB are free)"
        except OSError:  # the folder itself is missing
            return ""

    def _write(self, part: Path) -> dict[str, str]:
        """Write this rank's files, and return the SHA-256 of each by its name."""
        assert self._state is not None
        part.mkdir(parents=True, exist_ok=True)
        shared, own = self._state.taken()
        contents = {_own_file(ranks.rank()): own}
        if ranks.rank() == 0:
            contents[_SHARED] = shared
        digests = {}
        for name, content in contents.items():
            with (part / name).open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            digests[name] = _digest(part / name)
        return digests

    def _read(self, step: int) -> SavedTraining:
        """Read and check a checkpoint.

        Raises:
            OSError, ValueError, LookupError, TypeError, RuntimeError, UnpicklingError: If it is
                missing, damaged, or of another training.
        """
        if self._state is None:
            raise ValueError("this training's state can't be taken")
        folder = self._folder / checkpoint_name(step)
        names = (_SHARED, _own_file(ranks.rank()))
        for name in (_MANIFEST, *names):
            if not (folder / name).is_file():  # a pipe would be waited for
                raise ValueError(f"{folder / name} is missing, or no file")
        manifest = parsed_json((folder / _MANIFEST).read_bytes())
        expected = {"step": step, **self._identity()}
        for key, value in expected.items():
            if manifest[key] != value:
                raise ValueError(_difference(key, manifest[key], value))
        parts = []
        for name in names:
            if _digest(folder / name) != manifest["files"][name]:
                raise ValueError(f"{name} is damaged")
            parts.append(
                torch.load(folder / name, map_location="cpu", mmap=True, weights_only=True)
            )
        self._state.check_fits(*parts)
        return SavedTraining(step, *parts)

    def _identity(self) -> dict[str, Any]:
        """Return all that a checkpoint has to have in common with the training that reads it."""
        spec = self._run.spec
        return {
            "ranks": ranks.world_size(),
            "params": self._run.spec.params.as_record(),
            "seed": spec.seed,
            "workload": spec.workload,
            "data": self._run.prepared.fingerprint,
            "total_steps": self._run.total_steps,
            "device": ranks.device().type,
            "versions": {"carbonopt": carbonopt.__version__, **package_versions()},
        }


class _Clock:
    """Says after which step a checkpoint is due, without asking the other ranks at every step.

    The ranks' clocks differ, so they agree on each look; how long steps take says when to look
    again.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._since_s, self._since_step, self._look_at = time.monotonic(), 0, 1

    def begin(self, step: int) -> None:
        self._since_s, self._since_step, self._look_at = time.monotonic(), step, step + 1

    def is_due(self, step: int) -> bool:
        if step < self._look_at:
            return False
        elapsed_s = ranks.largest(time.monotonic() - self._since_s)
        if elapsed_s >= self._every_s:
            return True
        step_s = max(elapsed_s / (step - self._since_step), 1e-9)
        wait_s = min(self._every_s - elapsed_s, self._every_s / _CLOCK_LOOKS)
        self._look_at = step + max(1, int(wait_s / step_s))
        return False


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the system's error behind an error; None: there is none.

    Where the disk is full, torch's own error, which names its internals, hides that of the system.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _own_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Make a renaming in a folder last, should the machine fail."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _difference(key: str, there: Any, here: Any) -> str:
    """Say what differs between a checkpoint and the training that reads it."""
    if isinstance(there, dict) and isinstance(here, dict):
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                return _difference(f"{key}.{name}", there.get(name), here.get(name))
    return f"{key} was {str(there)[:80]}, but is {str(here)[:80]} now"

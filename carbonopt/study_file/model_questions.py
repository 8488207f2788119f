"""Questions about models, which a program of `carbonopt.train` answers without a GPU.

The program is a process of its own, because torch takes seconds to import. It answers all
questions of a command.
"""

import json
import select
import subprocess
import tempfile
from typing import IO, Literal, Self

from carbonopt.core.errors import CarbonoptError
from carbonopt.engines.process.environment import work_environment
from carbonopt.engines.process.processes import run_module
from carbonopt.spec.launch_settings import LocalLaunch

About = Literal["keys", "memory", "weights"]  # see `train.models.model_answers`

_PATIENCE_S = 300.0  # enough for torch from a cold network disk, or a large model in many settings


class Answers:
    """A process that answers questions about models, one after the other.

    It sees no GPU and does not go online. It is started by `begin` or the first question, and ends
    with the context.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def begin(self) -> None:
        """Start the process, so that it imports while this one does other work."""
        if self._process is not None:
            return
        environment = {**work_environment(LocalLaunch(gpus=()), []), "HF_HUB_OFFLINE": "1"}
        # A pipe that nobody reads would block it.
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, closed by _end
        self._process = subprocess.Popen(  # type: ignore[call-overload]
            run_module("carbonopt.train.models.model_answers"),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, about: About, question: str) -> str:
        """Return the answer to a question.

        Raises:
            CarbonoptError: If the program fails or takes too long; a sentence without its full
                stop.
        """
        self.begin()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([about, question]) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        if not select.select([process.stdout], [], [], _PATIENCE_S)[0]:
            self._end()
            raise CarbonoptError(f"it takes longer than {_PATIENCE_S:g} s")
        if not (line := process.stdout.readline()).endswith("\n"):
            self._fail()
        return str(json.loads(line))

    def _fail(self) -> None:
        """Raise the error that ended the process."""
        assert self._process is not None and self._log is not None
        code = self._process.wait(_PATIENCE_S)
        self._log.seek(0)
        last = next(filter(None, map(str.strip, reversed(self._log.readlines()))), "")
        self._end()
        raise CarbonoptError(last.removesuffix(".") or f"its process ended with code {code}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
        if self._log is not None:
            self._log.close()

"""Launcher of trials on this machine: their ranks are forked where possible, else are programs."""

import itertools
import json
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from carbonopt.core.channel import (
    COMPILES,
    FINGERPRINT,
    LIKELY_SEED,
    PREPARED,
    PREPARES,
    TASK,
    WORKLOAD,
)
from carbonopt.core.errors import BEFORE_A_TRIAL, BadInput, CarbonoptError, StudyInterrupted
from carbonopt.core.events import Exited, Failed, Finished, PhaseChanged
from carbonopt.core.files import write_json
from carbonopt.engines.engine import await_own_signal
from carbonopt.engines.process.environment import (
    Ranks,
    check_environment,
    finds_script_lines,
    of_launcher,
    work_environment,
)
from carbonopt.engines.process.extensions import (
    clear_dead_locks,
    missing_operators,
    needed_operators,
    wait_for,
)
from carbonopt.engines.process.forking import CannotFork, ForkedWork, ForkServer
from carbonopt.engines.process.processes import WorkProcesses, run_module
from carbonopt.spec.launch_settings import LocalLaunch
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import UnchosenSpace
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.trial_spec import Prepared, Program, TrialSpec
from carbonopt.spec.workload_settings import Workload
from carbonopt.storage.paths import StudyPaths

_TICK_S = 0.1


class Preparation:
    """The process that prepares the workload's data and compiles DeepSpeed's operators.

    See `carbonopt.train.prepare`. Data that was made for the same workload is used as it is. The
    process only imports until it is asked for its `result`. Only then does it touch a GPU or the
    study's folder.
    """

    def __init__(
        self,
        config: StudyConfig,
        launch: LocalLaunch,
        gpu_uuids: Sequence[str],
        paths: StudyPaths,
        fingerprint: str,
        world_size: int,
    ) -> None:
        assert config.workload is not None
        self.work: WorkProcesses | None = None
        self._paths, self._gpu_uuids = paths, gpu_uuids[:1]
        self._launch = launch.model_copy(update={"gpus": launch.gpus[:1], "cpu_ranks": 1})
        reads_data = config.workload.dataset is not None  # a script reads its own data
        self._made_before = (
            PreparedFolder(paths.prepared).made_for(fingerprint) if reads_data else None
        )
        chosen = self._made_before.auto if self._made_before is not None else None
        trained = config.search.space if chosen is None else chosen.space
        self._operators = needed_operators(launch, trained, is_script=not reads_data)
        # Operators count, too: the first trial would compile them within its measurement, or every
        # trial would fail for want of a compiler.
        self.is_needed = reads_data and (
            self._made_before is None or bool(missing_operators(self._operators))
        )
        workload, space = (
            config.workload.model_dump(mode="json"),
            config.search.space.model_dump(mode="json"),
        )
        self._spec = {"workload": workload, "space": space, "world_size": world_size}
        self._spec["auto"] = isinstance(config.search.space, UnchosenSpace)
        self._spec |= {"prepared_dir": str(paths.prepared.resolve()), "fingerprint": fingerprint}

    def start(self) -> None:
        """Start the preparation as a program of its own."""
        spec_file = self._paths.prepare_spec.resolve()
        write_json(spec_file, self._spec)
        argv = run_module("carbonopt.train.prepare", str(spec_file))
        environment = work_environment(self._launch, self._gpu_uuids)
        log = self._paths.prepare_log.resolve()
        self.work = WorkProcesses(
            argv, Ranks.alone(1).environments, environment, log, self._scratch()
        )

    def fork(self, fork_server: ForkServer, log: Path) -> None:
        """Fork the preparation from the fork server, which has imported everything.

        `log` receives its output until it has begun. Raises CannotFork.
        """
        ranks = [{**rank, PREPARES: "1"} for rank in Ranks.alone(1).environments]
        forked = ForkedWork(fork_server, ranks, log, self._scratch())
        forked.begin(json.dumps(self._spec), self._paths.prepare_log.resolve())
        self.work = forked

    def _scratch(self) -> tuple[str, str]:
        """Return the folder and the pattern of half-made data."""
        folder = self._paths.prepared.resolve()
        return str(folder.parent), f".{folder.name}.*"

    def result(self, interrupted: Callable[[], bool]) -> Prepared | None:
        """Wait for the preparation and return its result; None where there is nothing to prepare.

        Nothing is left running afterwards. `interrupted` is called ten times a second.

        Raises:
            StudyInterrupted: soon after `interrupted` returns true.
            BadInput: for mistakes in the data, the model, the tokenizer, a DeepSpeed key or an
                operator's lock.
            CarbonoptError: if the process fails or dies, with the last lines of its log.
        """
        with closing(self):
            wait_for(self._operators, interrupted)
            # A build that was waited for may have failed, or was killed and left half a library.
            self.is_needed = self.is_needed or bool(missing_operators(self._operators))
            if not self.is_needed:
                return self._made_before
            if self.work is None:
                self.start()
            work = self.work
            assert work is not None
            while not interrupted():
                match work.receive(_TICK_S):
                    case PhaseChanged():
                        work.answer()
                    case Finished(summary=summary):
                        return Prepared(**summary)
                    case Failed(kind="bad_input", text=text):
                        raise BadInput(text)
                    case Exited() if await_own_signal(interrupted):
                        break
                    case Failed() | Exited() as event:
                        how = (
                            f"failed: {event.text}"
                            if isinstance(event, Failed)
                            else f"ended with code {event.code}:"
                        )
                        raise CarbonoptError(
                            f"preparing the workload {how}\n{work.log_tail()}\n(log: {work.log})"
                        )
            raise StudyInterrupted(BEFORE_A_TRIAL)

    def close(self) -> None:
        if self.work is not None:
            self.work.end()


class ProcessLauncher:
    """Launcher of trials, forked from a process that has imported what they need (see `forking`).

    Where forking isn't possible, trials are programs of their own, and `note` receives one message
    about it. Constructing a launcher raises what `check_environment` raises.
    """

    def __init__(
        self, launch: LocalLaunch, gpu_uuids: Sequence[str], note: Callable[[str], None]
    ) -> None:
        check_environment()
        self._launch, self._gpu_uuids, self._note = launch, gpu_uuids, note
        self._environment = work_environment(launch, gpu_uuids)
        self._make: Callable[[], Preparation]  # set by `begin`
        self._preparation: Preparation | None = None
        self._fork_server: ForkServer | None = None
        self._next: ForkedWork | None = None
        self._next_ranks: Ranks  # the ranks of `_next`
        self._world_size = launch.world_size  # likely world size of the next trial
        # Returns the ranks of a trial that run here, by its world size.
        self.ranks_of: Callable[[int], Ranks] = Ranks.alone
        self._prelaunch_logs: Iterator[Path] = iter(())
        self._is_script = False
        self._uses_deepspeed = False  # whether the latest script's program uses DeepSpeed
        # Environment variables for all that can be done before a trial is known.
        self._of_the_study: dict[str, str] = {}
        # Folder in which other Pythons find `carbonopt.script`.
        self._lines_folder: tempfile.TemporaryDirectory[str] | None = None

    def begin(
        self,
        config: StudyConfig,
        paths: StudyPaths,
        fingerprint: str,
        world_size: int,
        *,
        prepares: bool,
    ) -> bool:
        """Start the process that trials are forked from, and the one that prepares their data.

        Both import for seconds, while the study goes on, and leave the GPUs alone.

        On CPUs, the preparation is forked from the first process as well, later: importing
        everything twice would cost energy, and cores that are needed. Beside a GPU, whose idle
        seconds cost more, both import at once.

        Args:
            config: the study's configuration.
            paths: the study's folder.
            fingerprint: the fingerprint of all that the prepared data depends on.
            world_size: the world size of a trial that uses all devices of all its machines.
            prepares: False where another worker may be preparing the data now.

        Returns:
            Whether there is anything to prepare.
        """
        workload = config.workload
        assert workload is not None
        self._make = partial(
            Preparation, config, self._launch, self._gpu_uuids, paths, fingerprint, world_size
        )
        self._world_size = world_size
        self._preparation = self._make() if prepares else None
        self._prelaunch_logs = (paths.waiting_log(number).resolve() for number in itertools.count())
        self._is_script = workload.dataset is None
        log = paths.template_log.resolve()
        if self._is_script:
            if self._launch.warm_start and config.can_fork:
                self._fork_server = self._script_server(workload, log)
            return False
        # The preparation has fetched everything from the hub; a trial that went online would
        # measure the network.
        self._of_the_study = {"HF_HUB_OFFLINE": "1"}
        if self._launch.warm_start:
            random_model = workload.model is not None and workload.model.from_config is not None
            self._of_the_study |= {
                PREPARED: str(paths.prepared.resolve()),
                FINGERPRINT: fingerprint,
                LIKELY_SEED: str(config.search.seed) if random_model else "",
            }
            self._fork_server = self._training_server(config, workload.task, log)
        if self._preparation is None or not self._preparation.is_needed:
            return False
        if self._fork_server is None or self._launch.gpus:
            self._preparation.start()
        return True

    def _script_server(self, workload: Workload, log: Path) -> ForkServer:
        """Start the process that the trials of a user's script are forked from."""
        environment = {**self._script_environment(), WORKLOAD: workload.model_dump_json()}
        own = workload.model_extra or {}
        python = shlex.split(own["command"])[0]
        return ForkServer(
            "carbonopt.train.scripts.script_rank", environment, log, python, own["folder"]
        )

    def _training_server(self, config: StudyConfig, task: str, log: Path) -> ForkServer:
        """Start the process that trials of carbonopt's own training are forked from."""
        compiles = {COMPILES: "1"} if config.may_compile else {}
        environment = self._environment | {TASK: task} | compiles
        return ForkServer("carbonopt.train.fork_template", environment, log)

    def close(self) -> None:
        """End the processes that wait for a next trial, the fork server and the preparation."""
        if self._preparation is not None:
            self._preparation.close()
        self._end_fork_server()
        if self._lines_folder is not None:
            self._lines_folder.cleanup()

    def _end_fork_server(self) -> None:
        self.drop_next()
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def start(self, spec: TrialSpec, log: Path) -> WorkProcesses:
        ranks = self.ranks_of(spec.params.world_size)
        self._world_size = spec.params.world_size  # the next trial is likely to have it, too
        spec_file = Path(spec.trial_dir) / (
            f"spec-{ranks.node}.json" if ranks.node else "spec.json"
        )
        write_json(spec_file, spec.model_dump(mode="json"))
        if spec.program is not None:
            self._uses_deepspeed = spec.program.uses_deepspeed
            clear_dead_locks(self._environment | spec.program.environment)
            for path, text in spec.program.files.items():
                Path(path).write_text(text, encoding="utf-8")
        if self._fork_server is not None:
            with self._cold_if_it_cannot_fork():
                if self._next is not None and self._next.has_died:
                    self.drop_next()
                if self._next is not None and not ranks.can_take_over(self._next_ranks):
                    self.drop_next()
                trial, self._next = self._next or self._prelaunch(self._fork_server, ranks), None
                trial.begin(spec.model_dump_json(), log)
                return trial
        if (program := spec.program) is not None:
            return self._start_program(program, ranks, log)
        argv = run_module("carbonopt.train.rank_main", str(spec_file))
        return WorkProcesses(
            argv, self._environments(ranks), self._environment, log, speaks=ranks.first == 0
        )

    def _start_program(self, program: Program, ranks: Ranks, log: Path) -> WorkProcesses:
        environment = self._script_environment() | program.environment
        speaks, own = ranks.first == 0, self._environments(ranks)
        if program.starts_ranks:
            own = [{**of_launcher(ranks), **self._cpu_variables(ranks)}]
        return WorkProcesses(
            [*program.argv], own, environment, log, (), program.folder, invites=True, speaks=speaks
        )

    def _script_environment(self) -> dict[str, str]:
        """Return the environment that all ranks of a script share, forked or not."""
        self._lines_folder = self._lines_folder or tempfile.TemporaryDirectory(prefix="carbonopt-")
        return finds_script_lines(self._environment, Path(self._lines_folder.name))

    def _environments(self, ranks: Ranks) -> list[dict[str, str]]:
        """Return the environment variables that each rank has for itself.

        The only rank of a script has none, as if its user had started it, unless the script uses
        DeepSpeed, which needs them.
        """
        if self._is_script and ranks.world_size == 1 and not self._uses_deepspeed:
            return [{}]
        shared = {**self._of_the_study, **self._cpu_variables(ranks)}
        return [{**rank, **shared} for rank in ranks.environments]

    def _cpu_variables(self, ranks: Ranks) -> dict[str, str]:
        """Return the variable that lets accelerate train a script's ranks together without a GPU.

        Without it, accelerate 1.15 leaves each rank alone with a copy of its own. With it,
        accelerate ignores DeepSpeed, so that scripts with DeepSpeed don't get it.
        """
        together = self._is_script and ranks.world_size > 1 and not self._uses_deepspeed
        return {"ACCELERATE_USE_CPU": "true"} if together and not self._launch.gpus else {}

    def prepare_next(self) -> None:
        """Start the next trial's processes, which open the GPUs.

        Opening them takes longer than all the rest of a set-up. Called at every report of a trial's
        steps, and not before: two set-ups at once wait for each other in the driver.
        """
        if (
            self._fork_server is not None
            and self._next is None
            and self._launch.gpus
            and not self._is_script
        ):
            with self._cold_if_it_cannot_fork():
                self._next = self._prelaunch(self._fork_server, self.ranks_of(self._world_size))

    def _prelaunch(self, fork_server: ForkServer, ranks: Ranks) -> ForkedWork:
        self._next_ranks = ranks
        own, log, speaks = self._environments(ranks), next(self._prelaunch_logs), ranks.first == 0
        return ForkedWork(fork_server, own, log, invites=self._is_script, speaks=speaks)

    def drop_next(self) -> None:
        """End the next trial's processes, if there are any."""
        if self._next is not None:
            self._next.end()
            self._next = None

    @contextmanager
    def _cold_if_it_cannot_fork(self) -> Iterator[None]:
        try:
            yield
        except CannotFork as error:
            self._note(f"each trial imports everything anew from now on: {error}")
            self._end_fork_server()

    def prepare(self, interrupted: Callable[[], bool]) -> Prepared | None:
        """Wait until trials can be started and return the result of the preparation.

        The first trial's processes open the GPUs as soon as they can, while the data is still
        prepared. Raises what `Preparation.result` raises.
        """
        self._preparation = self._preparation or self._make()

        def go_on() -> bool:
            if self._is_warm(0.0):
                self.prepare_next()
            return interrupted()

        if self._preparation.is_needed and self._preparation.work is None:
            self._await_warm(interrupted)
            if self._fork_server is not None:
                with self._cold_if_it_cannot_fork():
                    self._preparation.fork(self._fork_server, next(self._prelaunch_logs))
        prepared = self._preparation.result(go_on)
        self._await_warm(interrupted)
        self.prepare_next()
        return prepared

    def _await_warm(self, interrupted: Callable[[], bool]) -> None:
        while not self._is_warm(_TICK_S):
            if interrupted():
                raise StudyInterrupted(BEFORE_A_TRIAL)

    def _is_warm(self, timeout_s: float) -> bool:
        """Return whether a trial can start now: the fork server is ready, or there is none."""
        with self._cold_if_it_cannot_fork():
            return self._fork_server is None or self._fork_server.ready(timeout_s)
        return True

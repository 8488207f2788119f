"""Starts the ranks of trials on this machine: forked where that can be, else as programs of their own."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from carbonopt.core.config import LocalLaunch, StudyConfig, UnchosenSpace
from carbonopt.core.errors import BEFORE_FIRST_TRIAL, BadInput, CarbonoptError, StudyInterrupted
from carbonopt.core.events import (
    COMPILES,
    FINGERPRINT,
    LIKELY_SEED,
    PREPARED,
    PREPARES,
    TASK,
    WORKLOAD,
    Exited,
    Failed,
    Finished,
    PhaseChanged,
)
from carbonopt.core.files import PreparedFolder, write_json
from carbonopt.core.trial import Prepared, Program, TrialSpec
from carbonopt.engines.base import was_interrupted
from carbonopt.engines.process.environment import Ranks, check_environment, of_launcher, work_environment
from carbonopt.engines.process.extensions import missing_operators, needed_operators, wait_for
from carbonopt.engines.process.forking import CannotFork, ForkedWork, ForkServer
from carbonopt.engines.process.processes import WorkProcesses, run_module
from carbonopt.storage.paths import StudyPaths

_TICK_S = 0.1


class Preparation:
    """Reads, checks and tokenizes the workload's data, and has DeepSpeed's operators compiled (see
    `carbonopt.train.prepare`); what was made for the same workload is taken as it is. Its process, once started,
    imports until it is asked for its `result`: only then does it touch a GPU or the study's folder."""

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
        reads_data = config.workload.dataset is not None  # a script reads its own
        self._operators = needed_operators(launch, config.search.space) if reads_data else ()
        self._made_before = PreparedFolder(paths.prepared).made_for(fingerprint) if reads_data else None
        # Else the first trial would compile them, in what it measures, or every trial would die of a missing compiler.
        self.is_needed = reads_data and (self._made_before is None or bool(missing_operators(self._operators)))
        workload, space = config.workload.model_dump(mode="json"), config.search.space.model_dump(mode="json")
        self._spec = {"workload": workload, "space": space, "world_size": world_size}
        self._spec["auto"] = isinstance(config.search.space, UnchosenSpace)
        self._spec |= {"prepared_dir": str(paths.prepared.resolve()), "fingerprint": fingerprint}

    def start(self) -> None:
        """Starts it as a program of its own."""
        spec_file = self._paths.prepare_spec.resolve()
        write_json(spec_file, self._spec)
        argv = run_module("carbonopt.train.prepare", str(spec_file))
        environment = work_environment(self._launch, self._gpu_uuids)
        log = self._paths.prepare_log.resolve()
        self.work = WorkProcesses(argv, Ranks.alone(1).environments, environment, log, self._scratch())

    def fork(self, fork_server: ForkServer, log: Path) -> None:
        """Forks it from what trials are forked from, which has imported everything; `log` until it has begun. Raises
        CannotFork."""
        ranks = [{**rank, PREPARES: "1"} for rank in Ranks.alone(1).environments]
        forked = ForkedWork(fork_server, ranks, log, self._scratch())
        forked.begin(json.dumps(self._spec), self._paths.prepare_log.resolve())
        self.work = forked

    def _scratch(self) -> tuple[str, str]:
        """What is half made."""
        folder = self._paths.prepared.resolve()
        return str(folder.parent), f".{folder.name}.*"

    def result(self, interrupted: Callable[[], bool]) -> Prepared | None:
        """Waits for it; nothing is left running afterwards; None where there is nothing to prepare. Asks `interrupted`
        ten times a second.

        Raises:
            StudyInterrupted: soon after `interrupted` says so.
            BadInput: what is wrong with the data, the model, the tokenizer, a DeepSpeed key or an operator's lock.
            CarbonoptError: if the process dies, with the last lines of its log.
        """
        with closing(self):
            wait_for(self._operators, interrupted)
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
                    case Exited() if was_interrupted(interrupted):
                        break
                    case Failed() | Exited() as event:
                        how = f"failed: {event.text}" if isinstance(event, Failed) else f"ended with code {event.code}:"
                        raise CarbonoptError(f"preparing the workload {how}\n{work.log_tail()}\n(log: {work.log})")
            raise StudyInterrupted(BEFORE_FIRST_TRIAL)

    def close(self) -> None:
        if self.work is not None:
            self.work.end()


class ProcessLauncher:
    """Trials are forks of a process that has imported what they need (see `forking`), or programs of their own where
    that can't be; `note` is told so, once. Raises as `check_environment`."""

    def __init__(self, launch: LocalLaunch, gpu_uuids: Sequence[str], note: Callable[[str], None]) -> None:
        check_environment()
        self._launch, self._gpu_uuids, self._note = launch, gpu_uuids, note
        self._environment = work_environment(launch, gpu_uuids)
        self._make: Callable[[], Preparation]  # from `begin` on
        self._preparation: Preparation | None = None
        self._fork_server: ForkServer | None = None
        self._next: ForkedWork | None = None
        self._next_ranks: Ranks  # that it has
        self._world_size = launch.world_size  # of the next trial, most likely
        self.ranks_of: Callable[[int], Ranks] = Ranks.alone  # those of a trial that run here, by its world size
        self._prelaunch_logs: Iterator[Path] = iter(())
        self._is_script = False
        self._of_the_study: dict[str, str] = {}  # environment variables for what can be done before a trial is known

    def begin(
        self, config: StudyConfig, paths: StudyPaths, fingerprint: str, world_size: int, *, prepares: bool
    ) -> bool:
        """Starts the process that trials are forked from, and the one that prepares their data. Both import for
        seconds, while the study goes on, and leave the GPUs alone. Returns whether there is anything to prepare.
        `prepares`: False where another worker may be preparing it now; `world_size`: of a trial that leaves no device
        idle, on all its machines.

        On CPUs the preparation is forked from the first as well, later: to import everything twice would take cores
        that are wanted, and energy; beside a GPU, whose idle seconds cost more, both import at once."""
        workload = config.workload
        assert workload is not None
        self._make = partial(Preparation, config, self._launch, self._gpu_uuids, paths, fingerprint, world_size)
        self._world_size = world_size
        self._preparation = self._make() if prepares else None
        log = paths.template_log.resolve()
        self._prelaunch_logs = (paths.waiting_log(number).resolve() for number in itertools.count())
        self._is_script = workload.dataset is None
        if self._is_script:
            if self._launch.warm_start and (workload.model_extra or {}).get("warm"):
                script = {WORKLOAD: workload.model_dump_json()}
                self._fork_server = ForkServer("carbonopt.train.script_rank", self._environment | script, log)
            return False
        # The preparation has fetched what a hub has; a trial that went online would measure the network.
        self._of_the_study = {"HF_HUB_OFFLINE": "1"}
        if self._launch.warm_start:
            random_model = workload.model is not None and workload.model.from_config is not None
            self._of_the_study |= {PREPARED: str(paths.prepared.resolve()), FINGERPRINT: fingerprint}
            self._of_the_study[LIKELY_SEED] = str(config.search.seed) if random_model else ""
            environment = self._environment | {TASK: workload.task} | ({COMPILES: "1"} if config.may_compile else {})
            self._fork_server = ForkServer("carbonopt.train.forked_rank", environment, log)
        is_needed = self._preparation is not None and self._preparation.is_needed
        if self._preparation is not None and is_needed and (self._fork_server is None or self._launch.gpus):
            self._preparation.start()
        return is_needed

    def close(self) -> None:
        """Ends what waits for a next trial, what it was forked from, and a preparation that nobody has waited for."""
        if self._preparation is not None:
            self._preparation.close()
        self._end_fork_server()

    def _end_fork_server(self) -> None:
        self._drop_next()
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def start(self, spec: TrialSpec, log: Path) -> WorkProcesses:
        ranks = self.ranks_of(spec.params.world_size)
        self._world_size = spec.params.world_size  # which the next trial is likely to have, too
        spec_file = Path(spec.trial_dir) / (f"spec-{ranks.node}.json" if ranks.node else "spec.json")
        write_json(spec_file, spec.model_dump(mode="json"))
        if self._fork_server is not None:
            with self._cold_if_it_cannot_fork():
                if self._next is not None and self._next.has_died:
                    self._drop_next()
                if self._next is not None and not ranks.may_be(self._next_ranks):
                    self._drop_next()
                trial, self._next = self._next or self._prelaunch(self._fork_server, ranks), None
                trial.begin(spec.model_dump_json(), log)
                return trial
        if (program := spec.program) is not None:
            return self._start_program(program, ranks, log)
        argv = run_module("carbonopt.train.worker", str(spec_file))
        return WorkProcesses(argv, self._environments(ranks), self._environment, log, speaks=ranks.first == 0)

    def _start_program(self, program: Program, ranks: Ranks, log: Path) -> WorkProcesses:
        environment = self._environment | program.environment
        speaks, own = ranks.first == 0, self._environments(ranks)
        if program.starts_ranks:
            own = [of_launcher(ranks)]
        return WorkProcesses([*program.argv], own, environment, log, (), program.folder, invites=True, speaks=speaks)

    def _environments(self, ranks: Ranks) -> list[dict[str, str]]:
        """What each rank has for itself. One rank alone of a script has nothing, as if its user had started it."""
        alone = self._is_script and ranks.world_size == 1
        return [{}] if alone else [{**rank, **self._of_the_study} for rank in ranks.environments]

    def prepare_next(self) -> None:
        """Has the next trial's processes open the GPUs: that takes longer than all the rest of a set-up. Called at
        every report of a trial's steps, and not before: two set-ups at once wait for each other in the driver."""
        if self._fork_server is not None and self._next is None and self._launch.gpus and not self._is_script:
            with self._cold_if_it_cannot_fork():
                self._next = self._prelaunch(self._fork_server, self.ranks_of(self._world_size))

    def _prelaunch(self, fork_server: ForkServer, ranks: Ranks) -> ForkedWork:
        self._next_ranks = ranks
        own, log, speaks = self._environments(ranks), next(self._prelaunch_logs), ranks.first == 0
        return ForkedWork(fork_server, own, log, invites=self._is_script, speaks=speaks)

    def _drop_next(self) -> None:
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
        """What `begin` has begun, when trials can be started. The first trial's processes open the GPUs as soon as
        they can, while the data is still prepared. Raises what a preparation's `result` raises."""
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
                raise StudyInterrupted(BEFORE_FIRST_TRIAL)

    def _is_warm(self, timeout_s: float) -> bool:
        """Whether nothing has to be waited for before a trial: the fork server can fork, or there is none any more."""
        with self._cold_if_it_cannot_fork():
            return self._fork_server is None or self._fork_server.ready(timeout_s)
        return True

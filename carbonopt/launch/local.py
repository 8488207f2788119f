"""Trials on this machine, each a fresh set of processes."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from carbonopt.channel import PREPARED, Exited, Failed, Finished
from carbonopt.config import LocalLaunch, StudyConfig
from carbonopt.errors import BEFORE_FIRST_TRIAL, BadInput, CarbonoptError, StudyInterrupted
from carbonopt.launch.environment import cpu_is_quiet, rank_environments, work_environment
from carbonopt.launch.extensions import needed_operators, wait_for
from carbonopt.launch.processes import WorkProcesses
from carbonopt.launch.warm import CannotFork, Template, WaitingTrial
from carbonopt.paths import PreparedFolder, StudyPaths, write_json
from carbonopt.trial import Prepared, TrialSpec

_READY_TICK_S = 0.5


class LocalLauncher:
    """Trials are forks of a process that has imported what they need (see `warm`), or programs of their own where that
    can't be; `note` is told so, once."""

    def __init__(self, launch: LocalLaunch, gpu_uuids: Sequence[str], note: Callable[[str], None]) -> None:
        self._launch = launch
        self._gpu_uuids = gpu_uuids
        self._note = note
        # The preparation has fetched what a hub has; a trial that went online would measure the network.
        quiet = not launch.gpus and cpu_is_quiet()
        self._environment = {**work_environment(launch, gpu_uuids, quiet=quiet), "HF_HUB_OFFLINE": "1"}
        self._template: Template | None = None
        self._next: WaitingTrial | None = None
        self._waiting_logs: Iterator[Path] = iter(())
        self._prepared = ""

    def warm_up(self, paths: StudyPaths) -> None:
        """Starts the process that trials are forked from, which imports for seconds while the study goes on. The caller
        holds the lock of the study's folder."""
        if self._launch.warm_start:
            self._prepared = str(paths.prepared.resolve())
            self._waiting_logs = (paths.waiting_log(number).resolve() for number in itertools.count())
            self._template = Template("carbonopt.train.warm", self._environment, paths.template_log.resolve())

    def close(self) -> None:
        """Ends what waits for a next trial, and what it was forked from."""
        self._drop_next()
        if self._template is not None:
            self._template.close()
            self._template = None

    def seed(self, seed: int, params: object) -> int:
        """Every configuration is trained with the study's seed."""
        return seed

    def start(self, spec: TrialSpec, log: Path) -> WorkProcesses:
        spec_file = Path(spec.trial_dir) / "spec.json"
        write_json(spec_file, spec.model_dump(mode="json"))
        if self._template is not None:
            try:
                return self._start_warm(self._template, spec, log)
            except CannotFork as error:
                self._start_cold(str(error))
        argv = [sys.executable, "-m", "carbonopt.train.worker", str(spec_file)]
        return WorkProcesses(argv, rank_environments(self._launch), self._environment, log)

    def _start_warm(self, template: Template, spec: TrialSpec, log: Path) -> WorkProcesses:
        if self._next is not None and self._next.has_died:
            self._drop_next()
        waiting = self._next or self._waiting(template)
        self._next = None
        work = waiting.begin(spec.model_dump_json(), log)
        if self._launch.gpus:
            # Opening a GPU takes longer than all the rest of a set-up. The next trial does it beside this one's.
            try:
                self._next = self._waiting(template)
            except BaseException:
                work.end()
                raise
        return work

    def _waiting(self, template: Template) -> WaitingTrial:
        ranks = [{**rank, PREPARED: self._prepared} for rank in rank_environments(self._launch)]
        return WaitingTrial(template, ranks, self._environment, next(self._waiting_logs))

    def _drop_next(self) -> None:
        if self._next is not None:
            self._next.end()
            self._next = None

    def _start_cold(self, why: str) -> None:
        self._note(f"each trial imports everything anew from now on: {why}")
        self.close()

    def prepare(
        self, config: StudyConfig, paths: StudyPaths, fingerprint: str, interrupted: Callable[[], bool]
    ) -> Prepared:
        """Reads, checks and tokenizes the workload's data in a process of its own, once per study; what was made
        for the same workload is taken as it is. The caller holds the lock of the study's folder.

        Raises:
            StudyInterrupted: soon after `interrupted` says so.
            BadInput: what is wrong with the data, the model, the tokenizer, a DeepSpeed key or an operator's lock.
            CarbonoptError: if the process dies, with the last lines of its log.
        """
        assert config.workload is not None
        wait_for(needed_operators(self._launch, config.search.space), interrupted)
        if (found := PreparedFolder(paths.prepared).made_for(fingerprint)) is not None:
            self._wait_until_warm(interrupted)
            return found
        spec_file, log = paths.prepare_spec.resolve(), paths.prepare_log.resolve()
        prepared = paths.prepared.resolve()
        spec = {
            "workload": config.workload.model_dump(mode="json"),
            "space": config.search.space.model_dump(mode="json"),
            "prepared_dir": str(prepared),
            "fingerprint": fingerprint,
        }
        write_json(spec_file, spec)
        one_rank = self._launch.model_copy(update={"gpus": self._launch.gpus[:1], "cpu_ranks": 1})
        environment = work_environment(one_rank, self._gpu_uuids[:1])
        argv = [sys.executable, "-m", "carbonopt.train.prepare", str(spec_file)]
        half_made = (str(prepared.parent), f".{prepared.name}.*")
        work = WorkProcesses(argv, rank_environments(one_rank), environment, log, scratch=half_made)
        try:
            while not interrupted():
                match work.receive(_READY_TICK_S):
                    case Finished(summary=summary):
                        self._wait_until_warm(interrupted)
                        return Prepared(**summary)
                    case Failed(kind="bad_input", text=text):
                        raise BadInput(text)
                    case Failed(text=text):
                        raise CarbonoptError(f"preparing the workload failed: {text}\n{work.log_tail()}\n(log: {log})")
                    case Exited(code=code):
                        raise CarbonoptError(
                            f"preparing the workload ended with code {code}:\n{work.log_tail()}\n(log: {log})"
                        )
            raise StudyInterrupted(BEFORE_FIRST_TRIAL)
        finally:
            work.end()

    def _wait_until_warm(self, interrupted: Callable[[], bool]) -> None:
        try:
            while self._template is not None and not self._template.ready(_READY_TICK_S):
                if interrupted():
                    raise StudyInterrupted(BEFORE_FIRST_TRIAL)
        except CannotFork as error:
            self._start_cold(str(error))

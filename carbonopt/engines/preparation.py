"""The study's side of the preparation (see `carbonopt.train.prepare`): a process of its own, once per study."""

from collections.abc import Callable, Sequence
from contextlib import closing

from carbonopt.core.config import LocalLaunch, StudyConfig
from carbonopt.core.errors import BEFORE_FIRST_TRIAL, BadInput, CarbonoptError, StudyInterrupted
from carbonopt.core.events import Exited, Failed, Finished, PhaseChanged
from carbonopt.core.files import PreparedFolder, write_json
from carbonopt.core.trial import Prepared
from carbonopt.engines.process.environment import rank_environments, work_environment
from carbonopt.engines.process.extensions import missing_operators, needed_operators, wait_for
from carbonopt.engines.process.processes import WorkProcesses, run_module
from carbonopt.storage.paths import StudyPaths

_TICK_S = 0.1


class Preparation:
    """Reads, checks and tokenizes the workload's data, and has DeepSpeed's operators compiled; what was made for the
    same workload is taken as it is. There is no process where nothing is to be made.

    Its process is started at once, and imports until it is asked for its `result`: only then does it touch a GPU or
    the study's folder. The caller holds the lock of that folder.
    """

    def __init__(
        self, config: StudyConfig, launch: LocalLaunch, gpu_uuids: Sequence[str], paths: StudyPaths, fingerprint: str
    ) -> None:
        assert config.workload is not None
        self._operators = needed_operators(launch, config.search.space)
        self._made_before = PreparedFolder(paths.prepared).made_for(fingerprint)
        self.work: WorkProcesses | None = None  # None: there is nothing to prepare
        # Else the first trial would compile them, in what it measures, or every trial would die of a missing compiler.
        if self._made_before is not None and not missing_operators(self._operators):
            return
        spec_file, prepared = paths.prepare_spec.resolve(), paths.prepared.resolve()
        spec = {
            "workload": config.workload.model_dump(mode="json"),
            "space": config.search.space.model_dump(mode="json"),
            "prepared_dir": str(prepared),
            "fingerprint": fingerprint,
        }
        write_json(spec_file, spec)
        one_rank = launch.model_copy(update={"gpus": launch.gpus[:1], "cpu_ranks": 1})
        self.work = WorkProcesses(
            run_module("carbonopt.train.prepare", str(spec_file)),
            rank_environments(one_rank),
            work_environment(one_rank, gpu_uuids[:1]),
            paths.prepare_log.resolve(),
            scratch=(str(prepared.parent), f".{prepared.name}.*"),  # what is half made
        )

    def result(self, interrupted: Callable[[], bool]) -> Prepared:
        """Waits for it; nothing is left running afterwards. Asks `interrupted` ten times a second.

        Raises:
            StudyInterrupted: soon after `interrupted` says so.
            BadInput: what is wrong with the data, the model, the tokenizer, a DeepSpeed key or an operator's lock.
            CarbonoptError: if the process dies, with the last lines of its log.
        """
        with closing(self):
            wait_for(self._operators, interrupted)
            if (work := self.work) is None:
                assert self._made_before is not None
                return self._made_before
            while not interrupted():
                match work.receive(_TICK_S):
                    case PhaseChanged():
                        work.answer()
                    case Finished(summary=summary):
                        return Prepared(**summary)
                    case Failed(kind="bad_input", text=text):
                        raise BadInput(text)
                    case Failed() | Exited() as event:
                        how = f"failed: {event.text}" if isinstance(event, Failed) else f"ended with code {event.code}:"
                        raise CarbonoptError(f"preparing the workload {how}\n{work.log_tail()}\n(log: {work.log})")
            raise StudyInterrupted(BEFORE_FIRST_TRIAL)

    def close(self) -> None:
        if self.work is not None:
            self.work.end()

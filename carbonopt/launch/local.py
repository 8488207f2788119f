"""Trials on this machine, each a fresh set of processes."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from carbonopt.channel import Exited, Failed, Finished
from carbonopt.config import LocalLaunch, StudyConfig
from carbonopt.errors import BEFORE_FIRST_TRIAL, BadInput, CarbonoptError, StudyInterrupted
from carbonopt.launch.environment import rank_environments, work_environment
from carbonopt.launch.extensions import needed_operators, wait_for
from carbonopt.launch.processes import WorkProcesses
from carbonopt.paths import StudyPaths, write_json
from carbonopt.trial import Prepared, TrialSpec


class LocalLauncher:
    def __init__(self, launch: LocalLaunch, gpu_uuids: Sequence[str]) -> None:
        self._launch = launch
        self._gpu_uuids = gpu_uuids
        # The preparation has fetched what a hub has; a trial that went online would measure the network.
        self._environment = {**work_environment(launch, gpu_uuids), "HF_HUB_OFFLINE": "1"}

    def seed(self, seed: int, params: object) -> int:
        """Every configuration is trained with the study's seed."""
        return seed

    def start(self, spec: TrialSpec, log: Path) -> WorkProcesses:
        spec_file = Path(spec.trial_dir) / "spec.json"
        write_json(spec_file, spec.model_dump(mode="json"))
        argv = [sys.executable, "-m", "carbonopt.train.worker", str(spec_file)]
        return WorkProcesses(argv, rank_environments(self._launch), self._environment, log)

    def prepare(
        self, config: StudyConfig, paths: StudyPaths, fingerprint: str, interrupted: Callable[[], bool]
    ) -> Prepared:
        """Reads, checks and tokenizes the workload's data in a process of its own, once per study. The caller holds the
        lock of the study's folder.

        Raises:
            StudyInterrupted: soon after `interrupted` says so.
            BadInput: what is wrong with the data, the model, the tokenizer, a DeepSpeed key or an operator's lock.
            CarbonoptError: if the process dies, with the last lines of its log.
        """
        assert config.workload is not None
        wait_for(needed_operators(self._launch, config.search.space), interrupted)
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
                match work.receive(0.5):
                    case Finished(summary=summary):
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

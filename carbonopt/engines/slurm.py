"""Studies in Slurm jobs.

Outside a job, the command submits the study's jobs with submitit; inside a job, the same command
runs the study on what Slurm has allocated.

A job that comes to its time limit is warned before, ends its trial in order, and is queued again;
so is one that is preempted or requeued, or whose node fails.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from carbonopt.core.errors import EXIT_MET, EXIT_NOT_MET, BadInput, CarbonoptError
from carbonopt.core.extras import check_installed
from carbonopt.core.files import read_text, write_json
from carbonopt.core.format import count_text
from carbonopt.core.refusals import first_error
from carbonopt.core.values import Frozen
from carbonopt.energy.hardware import permitted_gpus
from carbonopt.energy.slurm_energy import StepEnergy, step_energy
from carbonopt.engines.engine import Engine
from carbonopt.engines.local import LocalEngine
from carbonopt.engines.nodes import NodesEngine, agent_program
from carbonopt.spec.launch_settings import SlurmLaunch
from carbonopt.spec.study_config import StudyConfig
from carbonopt.storage.paths import StudyPaths

_JOB, _TASK, _ON_NODE = "SLURM_JOB_ID", "SLURM_PROCID", "SLURMD_NODENAME"
_OF_A_STEP = re.compile(r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC)_(?!CONF$)")
_LOOK_AGAIN_S = 0.2
_WARNING = signal.SIGUSR2  # the signal that submitit uses
Noted = TypeVar("Noted")
_DETAIL = ("partition", "account", "qos", "constraint", "exclusive")


def in_allocation() -> bool:
    return _JOB in os.environ


def needs_jobs(config: StudyConfig) -> bool:
    """Return whether a study runs in jobs of Slurm, and this process is in none."""
    return config.launch.kind == "slurm" and not in_allocation()


def _needs_agents(launch: SlurmLaunch) -> bool:
    """Return whether trials run where this process doesn't.

    They do so on several nodes, or in an allocation that is used from outside, as with salloc.
    """
    return launch.nodes > 1 or (in_allocation() and _ON_NODE not in os.environ)


def here(config: StudyConfig) -> StudyConfig:
    """Return the study's configuration for this node of a job.

    Raises BadInput if the job has fewer GPUs than the study asks for.
    """
    launch = config.launch
    if not isinstance(launch, SlurmLaunch) or _needs_agents(launch):
        return config
    gpus = launch.gpus
    if in_allocation() and gpus:
        gpus = permitted_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if len(gpus) < len(launch.gpus):
            must = (
                f"a job of the study must have {count_text(launch.gpus_per_node, 'GPU')}"
                " (launch.gpus_per_node)"
            )
            raise BadInput(
                f"{must}, but this one has {len(gpus)}; ask Slurm for more, or give fewer."
            )
        gpus = gpus[: len(launch.gpus)]
    return config.model_copy(update={"launch": launch.on_this_machine(gpus)})


class AllocationEngine(LocalEngine):
    """Engine for trials in a job, on the job's one node.

    The CPU and RAM energy of other jobs on the node doesn't count.
    """

    def __init__(self, config: StudyConfig, slot: int = 0) -> None:
        super().__init__(here(config), slot)
        ranks = config.launch.world_size
        devices = (
            count_text(ranks, "GPU")
            if config.launch.gpus
            else f"the CPU, {count_text(ranks, 'rank')}"
        )
        self.description = f"jobs of Slurm, each trial on {devices}"

    def _slurm(self) -> StepEnergy | None:
        return step_energy() if self._slots == 1 else None


class AllocationNodesEngine(NodesEngine):
    """Engine for trials over the nodes of a job; srun starts an agent on each node."""

    def _programs(self) -> list[tuple[str, list[str]]]:
        assert isinstance(self._launch, SlurmLaunch)
        job, nodes = os.environ[_JOB], nodes_of_job()
        if len(nodes) != self._launch.nodes:
            must = (
                f"a job of the study must have {count_text(self._launch.nodes, 'node')}"
                " (launch.nodes)"
            )
            raise BadInput(f"{must}, but this one has {len(nodes)}: {', '.join(nodes)}.")
        step = [
            "srun",
            "--jobid",
            job,
            "--nodes",
            "1",
            "--ntasks",
            "1",
            "--overlap",
            "--cpu-bind",
            "none",
        ]
        # From its first moment on, the process must ignore the warning before a job's time limit,
        # which would kill it.
        agent = ["env", f"--ignore-signal={_WARNING.name.removeprefix('SIG')}", *agent_program()]
        return [(node, [*step, "--nodelist", node, *agent]) for node in nodes]

    def _environment(self) -> Mapping[str, str]:
        """Return this process's environment without Slurm's variables about its own step."""
        return {name: value for name, value in os.environ.items() if not _OF_A_STEP.match(name)}

    def _config_of(self, number: int) -> StudyConfig:
        assert isinstance(self._launch, SlurmLaunch)
        on_one = self._launch.model_copy(update={"nodes": 1, "nodes_per_trial": None})
        return self._config.model_copy(update={"launch": on_one})


def in_a_job(config: StudyConfig, slot: int = 0) -> Engine:
    """Make the engine for a job: with agents where trials run on other nodes than this process."""
    assert isinstance(config.launch, SlurmLaunch)
    return (AllocationNodesEngine if _needs_agents(config.launch) else AllocationEngine)(
        config, slot
    )


def nodes_of_job() -> list[str]:
    """Return the names of this job's nodes, in Slurm's order."""
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    asked = subprocess.run(
        [shutil.which("scontrol") or "scontrol", "show", "hostnames", listed],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        raise BadInput(
            f"scontrol must tell the nodes of {listed!r}, but says:"
            f" {' '.join(asked.stderr.split())}"
        )
    return asked.stdout.split()


class StudyJob:
    """The function that a job runs: the command that the user typed, in the same folder."""

    def __init__(self, command: Sequence[str], folder: str, code_file: str) -> None:
        self._command, self._folder, self._code_file = list(command), folder, code_file
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        if os.environ.get(_TASK, "0") != "0":
            # submitit starts this on each node; the first one's command starts all that it needs.
            return 0
        Path(self._code_file).unlink(missing_ok=True)  # an earlier attempt's
        # Slurm sends the warning to all processes of a job. It would kill the command and its
        # children, so they inherit that it is ignored.
        process = subprocess.Popen(
            self._command,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(_WARNING, signal.SIG_IGN),
        )
        self._process = process
        # Not `wait`: it holds a lock that `checkpoint` needs, which a signal handler calls
        # meanwhile.
        while (code := process.poll()) is None:
            time.sleep(_LOOK_AGAIN_S)
        write_json(Path(self._code_file), code)
        return code

    def checkpoint(self) -> Any:
        """End the command in order; submitit queues the job again with the returned submission."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.terminate()
            while self._process.poll() is None:
                time.sleep(_LOOK_AGAIN_S)
        return DelayedSubmission(StudyJob(self._command, self._folder, self._code_file))


class _Note(Frozen):
    jobs: tuple[str, ...]


_LOG_SAYS = "the job's log says how it ended"
_DONE = (EXIT_MET, EXIT_NOT_MET)  # exit codes of a study that has ended


class Jobs:
    """The Slurm jobs of one study folder."""

    def __init__(self, paths: StudyPaths) -> None:
        self._folder, self._note = paths.slurm, paths.slurm_jobs

    def alive(self) -> dict[int, str]:
        """Return the jobs that were submitted and have not ended, by worker; worker 0 leads."""
        jobs = enumerate(self._noted())
        return {number: job for number, job in jobs if job and state_of(job) is not None}

    def is_done(self, number: int) -> bool:
        """Return whether a worker's command has found nothing left to do."""
        file = self._code_file(number)
        return file.exists() and _read(file, int, _LOG_SAYS) in _DONE

    def submit(
        self,
        launch: SlurmLaunch,
        name: str,
        command: Sequence[str],
        numbers: Iterable[int],
        alive: Mapping[int, str],
        begins_in_s: int = 0,
    ) -> dict[int, str]:
        """Submit the jobs of workers, and return all jobs that go on, by worker.

        Args:
            launch: what is asked of Slurm.
            name: the study's name.
            command: the command that each job runs.
            numbers: the workers, in order; worker 0 leads.
            alive: the jobs that go on, as `alive` returned them.
            begins_in_s: seconds before which Slurm does not begin the jobs.

        Raises:
            BadInput: if submitit or Slurm is missing, or Slurm refuses the first job.
            CarbonoptError: if Slurm refuses a later job; those already submitted go on.
        """
        check_installed("submitit", "slurm", "launch.kind: slurm")
        import submitit

        try:
            executor = submitit.SlurmExecutor(self._folder, max_num_timeout=10**9)
        except RuntimeError as error:
            raise BadInput(
                "launch.kind: slurm needs Slurm's sbatch and srun on PATH; run it on a login node."
            ) from error
        executor.update_parameters(**_parameters(launch, name, begins_in_s))
        jobs, noted = dict(alive), list(self._noted())
        for number in numbers:
            # It tells how an earlier job ended; this one may be cancelled before it begins.
            self._code_file(number).unlink(missing_ok=True)
            argv = [*command, *(["--worker"] if number else [])]
            code_file = str(self._code_file(number).resolve())
            try:
                job = executor.submit(StudyJob(argv, str(Path.cwd()), code_file))
            except (
                subprocess.CalledProcessError,
                submitit.core.utils.FailedJobError,
                submitit.core.utils.FailedSubmissionError,
            ) as error:
                reason = f"Slurm refuses the job: {' '.join(str(error).split())}"
                if jobs:  # they may already have begun with the study
                    raise CarbonoptError(
                        f"{reason}; those that it took go on: {', '.join(jobs.values())}."
                    ) from error
                raise BadInput(reason) from error
            jobs[number] = job.job_id
            noted += [""] * (number + 1 - len(noted))
            noted[number] = job.job_id
            write_json(self._note, {"jobs": noted})
        return dict(sorted(jobs.items()))

    def _noted(self) -> tuple[str, ...]:
        """Return the last job of each worker; empty: it never had one."""
        if not self._note.exists():
            return ()
        advice = "look for its jobs with squeue, and remove it when none is left"
        return _read(self._note, _Note, advice).jobs

    def log(self, job: str) -> Path:
        """Return the log of a job, with the output of all its attempts."""
        return self._folder / f"{job}_0_log.out"

    def exit_code(self) -> int | None:
        """Return the exit code of the leading job's command; None if it ended without one."""
        file = self._code_file(0)
        return _read(file, int, _LOG_SAYS) if file.exists() else None

    def _code_file(self, number: int) -> Path:
        return self._folder / f"exit-code-{number}.json"


def _read(file: Path, kind: type[Noted], advice: str) -> Noted:
    try:
        return TypeAdapter(kind).validate_json(read_text(file, "the note of a study's jobs,", 1))
    except ValidationError as error:
        raise BadInput(f"{file} is damaged: {first_error(error)}; {advice}.") from error


def state_of(job: str) -> str | None:
    """Return a job's state in Slurm's words, such as PENDING; None if the job has ended.

    Raises CarbonoptError if Slurm doesn't answer.
    """
    asked = subprocess.run(
        [shutil.which("squeue") or "squeue", "--noheader", "--jobs", job, "--format", "%T"],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode == 0:
        return asked.stdout.strip() or None
    if "Invalid job id" in asked.stderr:
        return None
    raise CarbonoptError(
        f"squeue must tell of job {job}, but says: {' '.join(asked.stderr.split())}"
    )


def command_in_job(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "carbonopt", "run", *arguments]


def _parameters(launch: SlurmLaunch, name: str, begins_in_s: int = 0) -> dict[str, Any]:
    """Return a launch's settings under submitit's names."""
    given = {key: getattr(launch, key) for key in _DETAIL if getattr(launch, key)}
    if launch.gpus_per_node:
        given["gpus_per_node"] = launch.gpus_per_node
    if launch.cpus_per_node is not None:
        given["cpus_per_task"] = launch.cpus_per_node
    if launch.memory_gib is not None:
        given["mem"] = f"{round(launch.memory_gib * 1024)}M"
    if launch.setup:
        given["setup"] = list(launch.setup)
    return {
        **given,
        "job_name": f"carbonopt-{name}",
        "time": launch.time,
        "nodes": launch.nodes,
        "ntasks_per_node": 1,
        "signal_delay_s": launch.warned_s,
        "stderr_to_stdout": True,
        "additional_parameters": {
            "requeue": True,
            **({"begin": f"now+{begins_in_s}"} if begins_in_s else {}),
        },
    }

"""Studies in jobs of Slurm. Where no job runs, they are submitted, by submitit; in a job, the same command runs the
study on what Slurm has given it.

A job that comes to its time limit is warned before, ends its trial in order, and is queued again; so is one that is
preempted or requeued, or whose node fails.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from carbonopt.core.config import SlurmLaunch, StudyConfig
from carbonopt.core.errors import BadInput, CarbonoptError, first_fault
from carbonopt.core.files import read_text, write_json
from carbonopt.core.format import count_text
from carbonopt.core.values import Frozen
from carbonopt.energy.hardware import permitted_gpus
from carbonopt.energy.share import all_cores
from carbonopt.energy.slurm import StepEnergy, step_energy
from carbonopt.engines.base import Engine
from carbonopt.engines.local import LocalEngine
from carbonopt.engines.nodes import NodesEngine, agent_program
from carbonopt.storage.paths import StudyPaths

_JOB, _TASK, _ON_NODE = "SLURM_JOB_ID", "SLURM_PROCID", "SLURMD_NODENAME"
_OF_A_STEP = re.compile(r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC)_(?!CONF$)")
_LOOK_AGAIN_S = 0.2
_WARNING = signal.SIGUSR2  # submitit's own
Noted = TypeVar("Noted")
_DETAIL = ("partition", "account", "qos", "constraint", "exclusive")


def in_allocation() -> bool:
    return _JOB in os.environ


def _needs_agents(launch: SlurmLaunch) -> bool:
    """Whether trials run where this process doesn't: on several nodes, or in an allocation that was asked for and is
    used from elsewhere, as by salloc."""
    return launch.nodes > 1 or (in_allocation() and _ON_NODE not in os.environ)


def here(config: StudyConfig) -> StudyConfig:
    """As a study runs on this node of a job. Raises BadInput if the job has other GPUs than the study asks for."""
    launch = config.launch
    if not isinstance(launch, SlurmLaunch) or _needs_agents(launch):
        return config
    gpus = launch.gpus
    if in_allocation() and gpus:
        gpus = permitted_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if len(gpus) < len(launch.gpus):
            must = f"a job of the study must have {count_text(launch.gpus_per_node, 'GPU')} (launch.gpus_per_node)"
            raise BadInput(f"{must}, but this one has {len(gpus)}; ask Slurm for more, or give fewer.")
        gpus = gpus[: len(launch.gpus)]
    return config.model_copy(update={"launch": launch.on_this_machine(gpus)})


class AllocationEngine(LocalEngine):
    """Trials in a job, on its node. What is other jobs' of the node's CPU and RAM doesn't count."""

    def __init__(self, config: StudyConfig, slot: int = 0) -> None:
        super().__init__(here(config), slot)
        ranks = config.launch.world_size
        devices = count_text(ranks, "GPU") if config.launch.gpus else f"the CPU, {count_text(ranks, 'rank')}"
        self.description = f"jobs of Slurm, each trial on {devices}"

    def _slurm(self) -> StepEnergy | None:
        return step_energy() if self._slots == 1 else None

    def _sharing(self, cores: Sequence[int]) -> Collection[int]:
        return {*all_cores(), *cores}


class AllocationNodesEngine(NodesEngine):
    """Trials over all nodes of a job, on each of which srun starts an agent."""

    def _programs(self) -> list[tuple[str, list[str]]]:
        assert isinstance(self._launch, SlurmLaunch)
        job, nodes = os.environ[_JOB], nodes_of_job()
        if len(nodes) != self._launch.nodes:
            must = f"a job of the study must have {count_text(self._launch.nodes, 'node')} (launch.nodes)"
            raise BadInput(f"{must}, but this one has {len(nodes)}: {', '.join(nodes)}.")
        step = ["srun", "--jobid", job, "--nodes", "1", "--ntasks", "1", "--overlap", "--cpu-bind", "none"]
        # As soon as there is a process it must not die of the warning that comes before a job's time limit.
        agent = ["env", f"--ignore-signal={_WARNING.name.removeprefix('SIG')}", *agent_program()]
        return [(node, [*step, "--nodelist", node, *agent]) for node in nodes]

    def _environment(self) -> Mapping[str, str]:
        """Without what Slurm has said of the step that this process is in."""
        return {name: value for name, value in os.environ.items() if not _OF_A_STEP.match(name)}

    def _config_of(self, number: int) -> StudyConfig:
        assert isinstance(self._launch, SlurmLaunch)
        on_one = self._launch.model_copy(update={"nodes": 1, "nodes_per_trial": None})
        return self._config.model_copy(update={"launch": on_one})


def in_a_job(config: StudyConfig, slot: int = 0) -> Engine:
    """As many nodes as a job has."""
    assert isinstance(config.launch, SlurmLaunch)
    return (AllocationNodesEngine if _needs_agents(config.launch) else AllocationEngine)(config, slot)


def nodes_of_job() -> list[str]:
    """The names of this job's nodes, in Slurm's order."""
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    asked = subprocess.run(
        [shutil.which("scontrol") or "scontrol", "show", "hostnames", listed],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        raise BadInput(f"scontrol must tell the nodes of {listed!r}, but says: {' '.join(asked.stderr.split())}")
    return asked.stdout.split()


class StudyJob:
    """What a job runs, from whichever node: the command that was typed."""

    def __init__(self, command: Sequence[str], folder: str, code_file: str) -> None:
        self._command, self._folder, self._code_file = list(command), folder, code_file
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        if os.environ.get(_TASK, "0") != "0":
            return 0  # submitit starts one on each node, where the first one's command starts what it needs
        Path(self._code_file).unlink(missing_ok=True)  # of an earlier attempt
        # The warning goes to all processes of a job; what they would die of, they inherit as ignored.
        process = subprocess.Popen(
            self._command,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(_WARNING, signal.SIG_IGN),
        )
        self._process = process
        # Not `wait`, whose lock `checkpoint`, which a signal's handler calls meanwhile, could not take.
        while (code := process.poll()) is None:
            time.sleep(_LOOK_AGAIN_S)
        write_json(Path(self._code_file), code)
        return code

    def checkpoint(self) -> Any:
        """Ends the command in order; submitit queues the job again, with what this returns."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.terminate()
            while self._process.poll() is None:
                time.sleep(_LOOK_AGAIN_S)
        return DelayedSubmission(StudyJob(self._command, self._folder, self._code_file))


class _Note(Frozen):
    jobs: tuple[str, ...]


class Jobs:
    """The jobs of a study's folder."""

    def __init__(self, paths: StudyPaths) -> None:
        self._folder, self._note = paths.slurm, paths.slurm_jobs

    def alive(self) -> list[str]:
        """Those that have been submitted and not ended, the leading one first."""
        if not self._note.exists():
            return []
        noted = _read(self._note, _Note, "look for its jobs with squeue, and remove it when none is left")
        return [job for job in noted.jobs if state_of(job) is not None]

    def submit(self, launch: SlurmLaunch, name: str, command: Sequence[str]) -> list[str]:
        """One for each worker; the first leads. Raises BadInput where there is no submitit or no Slurm, or it refuses
        the job."""
        try:
            import submitit
        except ImportError as error:
            raise BadInput("launch.kind: slurm needs submitit; type: pip install 'carbonopt[slurm]'.") from error
        try:
            executor = submitit.SlurmExecutor(self._folder, max_num_timeout=10**9)
        except RuntimeError as error:
            raise BadInput(
                "launch.kind: slurm needs Slurm's sbatch and srun on PATH; run it on a login node."
            ) from error
        executor.update_parameters(**_parameters(launch, name))
        jobs: list[str] = []
        for number in range(launch.workers):
            argv = [*command, *(["--worker"] if number else [])]
            code_file = str(self._code_file(number).resolve())
            try:
                job = executor.submit(StudyJob(argv, str(Path.cwd()), code_file))
            except (
                subprocess.CalledProcessError,
                submitit.core.utils.FailedJobError,
                submitit.core.utils.FailedSubmissionError,
            ) as error:
                raise BadInput(f"Slurm refuses the job: {' '.join(str(error).split())}") from error
            jobs.append(job.job_id)
            write_json(self._note, {"jobs": jobs})
        return jobs

    def log(self, job: str) -> Path:
        """What a job prints, all its attempts."""
        return self._folder / f"{job}_0_log.out"

    def exit_code(self) -> int | None:
        """Of the leading job's command; None: it was ended before it could say so."""
        file = self._code_file(0)
        return _read(file, int, "the job's log says how it ended") if file.exists() else None

    def _code_file(self, number: int) -> Path:
        return self._folder / f"exit-code-{number}.json"


def _read(file: Path, kind: type[Noted], advice: str) -> Noted:
    try:
        return TypeAdapter(kind).validate_json(read_text(file, "the note of a study's jobs,", 1))
    except ValidationError as error:
        raise BadInput(f"{file} is damaged: {first_fault(error)}; {advice}.") from error


def state_of(job: str) -> str | None:
    """In Slurm's words, such as PENDING; None: it has ended. Raises CarbonoptError if Slurm doesn't answer."""
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
    raise CarbonoptError(f"squeue must tell of job {job}, but says: {' '.join(asked.stderr.split())}")


def command_in_job(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "carbonopt", "run", *arguments]


def _parameters(launch: SlurmLaunch, name: str) -> dict[str, Any]:
    """As submitit calls them."""
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
        "additional_parameters": {"requeue": True},
    }

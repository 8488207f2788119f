"""The check of Slurm: what a job has of its node, or whether jobs can be submitted from here."""

import os
import shutil
from importlib.util import find_spec

from carbonopt.core.format import count_text
from carbonopt.doctor.check_result import Finding, ok, warning
from carbonopt.energy.cpu_time import all_cores
from carbonopt.engines.slurm import in_allocation

_GPUS_ALONE = "carbon: {objective: gpu}"


def slurm(gpus: int) -> Finding | None:
    """Check what a Slurm job has of its node, or whether jobs can be submitted from here.

    Args:
        gpus: Number of GPUs that this process may use.

    Returns:
        The finding. None: there is no Slurm here.
    """
    if in_allocation():
        return _job(gpus)
    if shutil.which("sbatch") is None:
        return None
    if find_spec("submitit") is None:
        return warning(
            "Slurm is here, but submitit, which submits jobs, is not",
            "pip install 'carbonopt[slurm]'",
        )
    return ok("jobs can be submitted (launch: {kind: slurm})")


def _job(gpus: int) -> Finding:
    job, node = os.environ["SLURM_JOB_ID"], os.environ.get("SLURMD_NODENAME")
    if node is None:
        return ok(f"job {job}, used from outside its nodes: srun starts an agent on each")
    ours, whole = len(os.sched_getaffinity(0)), len(all_cores())
    given = int(os.environ.get("SLURM_CPUS_ON_NODE", ours))
    has = f"job {job} on {node}: {count_text(gpus, 'GPU')}, {given} of {count_text(whole, 'core')}"
    if min(given, ours) < whole == ours:
        return warning(
            f"{has}, bound to none of them: the whole node's CPU and RAM count", _GPUS_ALONE
        )
    share = "; of the node's CPU and RAM energy their share counts" if ours < whole else ""
    return ok(has + share)

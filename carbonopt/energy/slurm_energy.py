"""Slurm's own reading of the energy of a job's nodes, beside the GPUs' counters and CodeCarbon.

Where the cluster reads its nodes' energy (AcctGatherEnergyType: IPMI, RAPL, Cray's counters),
`sstat` gives the energy of a running step, and `sacct` the same when the step has ended. It is all
that the nodes draw, whoever uses them: each of several jobs that share a node is given the whole.
"""

import os
import shutil
import subprocess
import time

from carbonopt.core.units import kwh_from_joules

_EXCLUSIVE = "NO"  # squeue's answer for nodes that no other job may share
_AGAIN_S = 5.0  # interval between queries; Slurm reads its nodes every second to minute


class StepEnergy:
    """The energy of the nodes of a Slurm step, from now on."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._began_kwh = self._latest_kwh = self._reading_kwh()
        self._read_at_s = time.monotonic()

    def kwh(self) -> float | None:
        """Return the energy so far; None if this cluster reads no energy, or has read none yet."""
        if time.monotonic() - self._read_at_s >= _AGAIN_S:
            self._read_at_s, self._latest_kwh = (
                time.monotonic(),
                self._reading_kwh() or self._latest_kwh,
            )
        if self._latest_kwh is None or self._latest_kwh == 0:
            return None
        return self._latest_kwh - (self._began_kwh or 0.0)

    def _reading_kwh(self) -> float | None:
        """Return Slurm's total for the step; None if Slurm has none for it."""
        said = _asked(
            "sstat",
            "--noheader",
            "--parsable2",
            "--jobs",
            self._step,
            "--format",
            "ConsumedEnergyRaw",
        )
        return kwh_from_joules(float(said)) if said.isdigit() else None


def step_energy() -> StepEnergy | None:
    """Return Slurm's energy reading of this process's step of a job.

    None outside a job, or where other jobs may share its nodes.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or _asked("squeue", "--noheader", "--jobs", job, "--format", "%h") != _EXCLUSIVE:
        return None
    return StepEnergy(f"{job}.{os.environ.get('SLURM_STEP_ID', 'batch')}")


def _asked(*command: str) -> str:
    """Return the output of a Slurm program; an empty text if it is missing or fails.

    Errors don't matter here, since this reading is additional.
    """
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

"""What Slurm itself says that a job's nodes have used: a third account, beside the GPUs' counters and CodeCarbon.

Where the cluster reads its nodes' energy (AcctGatherEnergyType: IPMI, RAPL, Cray's counters), `sstat` tells it of a
running step, and `sacct` the same when the step has ended: of all that the nodes draw, whoever uses them, so that of
jobs that share a node each is told the whole.
"""

import os
import shutil
import subprocess
import time

from carbonopt.core.units import kwh_from_joules

_EXCLUSIVE = "NO"  # whether others may share the nodes, as squeue has it
_AGAIN_S = 5.0  # Slurm reads its nodes every second to minute


class StepEnergy:
    """In kWh, of the nodes of the step that this process is in, from now on."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._began_kwh = self._latest_kwh = self._told_kwh()
        self._read_at_s = time.monotonic()

    def kwh(self) -> float | None:
        """None: this cluster reads no energy, or has read none yet."""
        if time.monotonic() - self._read_at_s >= _AGAIN_S:
            self._read_at_s, self._latest_kwh = time.monotonic(), self._told_kwh() or self._latest_kwh
        if self._latest_kwh is None or self._latest_kwh == 0:
            return None
        return self._latest_kwh - (self._began_kwh or 0.0)

    def _told_kwh(self) -> float | None:
        """None where the step isn't known any more."""
        said = _asked("sstat", "--noheader", "--parsable2", "--jobs", self._step, "--format", "ConsumedEnergyRaw")
        return kwh_from_joules(float(said)) if said.isdigit() else None


def step_energy() -> StepEnergy | None:
    """Of this process's step of a job. None outside of a job, or where others may share its nodes."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or _asked("squeue", "--noheader", "--jobs", job, "--format", "%h") != _EXCLUSIVE:
        return None
    return StepEnergy(f"{job}.{os.environ.get('SLURM_STEP_ID', 'batch')}")


def _asked(*command: str) -> str:
    """What a program of Slurm's says; nothing where there is none, or it fails: this account is one more."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

"""Work of a study's training: tokens, floating-point operations, and time on its devices."""

import math
from collections import defaultdict
from collections.abc import Iterable

from carbonopt.analysis.footprint import known_sum
from carbonopt.analysis.stages import flop_per_token
from carbonopt.core.trial import TrialRecord
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import SessionLedger, StudyData, union_s, wall_clock_s


class TrainingWork(Frozen):
    """The work of all of a study's runs: trials in every state, and probes.

    What interrupted attempts had trained before a trial began anew is not in the tokens and FLOP.
    """

    tokens: int | None  # training tokens over all ranks; None: not known of every run
    probe_tokens: (
        int | None
    )  # the part of `tokens` that probes have; None: not known of every probe
    measured_tokens: int | None  # those of runs whose energy is known
    # FLOP of the model, by 6 × parameters × tokens; None: not known of every run
    flop: float | None
    parameters: int | None
    wall_clock_s: float  # time in which at least one session worked; waits for hours don't count
    waited_s: float  # time in which sessions waited for the hours of a schedule and none worked
    elapsed_s: float  # time from the first session's begin to the end of the last
    # names of the launch's GPUs, with those of all trials that run side by side; empty: it has
    # none, or they are not known
    gpus: tuple[str, ...]
    machines: int  # machines of the launch; 0: not known
    # devices × the time in which the study had them, whether they worked or not; None: not known
    device_s: float | None

    @property
    def are_gpus(self) -> bool:
        """Whether `devices` are GPUs."""
        return bool(self.gpus)

    @property
    def devices(self) -> int:
        """The number of the launch's GPUs, or of its machines where it has none; 0: not known."""
        return len(self.gpus) or self.machines


def training_work(data: StudyData) -> TrainingWork:
    """Add up the training of a study's runs and the time in which it had its devices."""
    runs = (*data.records, *data.probes)
    spans = [session.span for session in data.sessions]
    worked_s = wall_clock_s(data.sessions)
    hardware, launch = data.provenance.hardware, data.config.launch
    gpus = hardware.gpus * launch.slots if hardware else ()
    # Local trials side by side share a machine, and so do those of one node.
    groups = 1 if launch.is_local else launch.slots // launch.slots_of_node
    machines = hardware.nodes * groups if hardware else 0
    devices = len(gpus) or machines
    return TrainingWork(
        tokens=_tokens(data, runs),
        probe_tokens=_tokens(data, data.probes),
        measured_tokens=_tokens(data, [run for run in runs if run.energy_kwh is not None]),
        flop=known_sum(trained_flop(data, run) for run in runs),
        parameters=data.prepared.model_parameters if data.prepared else None,
        wall_clock_s=worked_s,
        waited_s=max(0.0, union_s(spans) - worked_s),
        elapsed_s=(max(end for _, end in spans) - min(spans)[0]).total_seconds() if spans else 0.0,
        gpus=gpus,
        machines=machines,
        device_s=devices * _launch_s(data) if devices else None,
    )


def _tokens(data: StudyData, runs: Iterable[TrialRecord]) -> int | None:
    tokens = known_sum(trained_tokens(data, run) for run in runs)
    return None if tokens is None else int(tokens)


def trained_tokens(data: StudyData, record: TrialRecord) -> int | None:
    """Return the training tokens of a run's last attempt, over all ranks.

    None: the run made steps, but its tokens a step are not known. Where they are known, each step
    has as many.
    """
    last = record.evals[-1] if record.evals else None
    steps = record.steps_done if record.steps_done is not None else last.step if last else 0
    if not steps:
        return 0
    if last is not None and last.step:
        return None if last.tokens is None else round(last.tokens * steps / last.step)
    length = data.prepared.sequence_length if data.prepared else None
    batch = record.params.global_batch_size
    return None if length is None or batch is None else steps * batch * length


def trained_flop(data: StudyData, record: TrialRecord) -> float | None:
    """Return the model's FLOP of a run: 6 × parameters × tokens (Kaplan et al., arXiv 2001.08361).

    None: the tokens or the FLOP of a token are not known, or the task passes a token through the
    model more or less often than once forward and once backward.
    """
    workload, tokens = data.config.workload, trained_tokens(data, record)
    each = flop_per_token(record.params, data)
    passes_once = workload is not None and workload.task == "causal_lm"
    if tokens is None or each is None or not passes_once:
        return None
    return float(each * tokens)


def _launch_s(data: StudyData) -> float:
    """Return for how long the study had its launch's devices, added up over its launches.

    It has them while it waits for the hours of a schedule, too. Local workers share the devices of
    one launch, so their time counts once; a worker that joins from elsewhere has devices of its
    own.
    """
    shares = data.config.launch.slots > 1
    by_launch: dict[str | None, list[SessionLedger]] = defaultdict(list)
    for session in data.sessions:
        worker = session.worker
        # names of workers are made in `storage.workers`
        owner = worker.rsplit("-", 2)[0] if worker is not None and shares else worker
        by_launch[owner].append(session)
    return math.fsum(
        union_s(session.span for session in sessions) for sessions in by_launch.values()
    )

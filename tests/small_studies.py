"""Small studies made by hand, for the tests of reports."""

import math
import random
from typing import Any

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import PERPLEXITY, REWARD, Quality, quality_of
from carbonopt.core.trial import (
    Durations,
    Energy,
    GpuEnergy,
    NodeReadings,
    Phase,
    QualityResult,
    Stage,
    StageCost,
    StopReason,
    TrialRecord,
    TrialState,
)
from carbonopt.core.units import emissions_kg_co2e, kwh_from_joules
from carbonopt.spec.study_data import (
    CarbonTrace,
    Hardware,
    IdlePower,
    Intensity,
    Provenance,
    SessionLedger,
    StudyData,
)
from carbonopt.study_file.reader import parse_study

INTENSITY_G_PER_KWH = 230.0


def trial(
    number: int, train_kwh: float = 1e-3, perplexity: float | None = 5.0, **changes
) -> TrialRecord:
    params: dict[str, Any] = {
        "global_batch_size": 16,
        "micro_batch_size_per_gpu": 8,
        "learning_rate": 1e-3 * (1 + number),
        "epochs": 2,
    }
    params |= changes.pop("params", {})
    values: dict[str, Any] = {
        "trial": number,
        "state": TrialState.COMPLETE,
        "seed": 3,
        "params": TrialParams(**params),
        "quality": QualityResult(name=PERPLEXITY.name, value=perplexity),
        "emissions_kg_co2e": emissions_kg_co2e(train_kwh, INTENSITY_G_PER_KWH, 1.1),
        "energy_kwh": Energy(
            train=train_kwh, setup=1e-4, eval=1e-4, total=train_kwh + 2e-4, train_gpu=train_kwh / 2
        ),
        "duration_s": Durations(train=60, setup=5, eval=1, total=66),
        "evals": (evaluation(perplexity, tokens=100),),
        "total_steps": 40,
    }
    return TrialRecord(**{**values, **changes})


def evaluation(perplexity: float | None, tokens: int | None) -> EvalPoint:
    """At step 10, over 100 tokens; None: it was not finite."""
    nll_sum = math.nan if perplexity is None else math.log(perplexity) * 100
    return EvalPoint.of(PERPLEXITY, nll_sum, 100, step=10, tokens=tokens)


def study(*records: TrialRecord, name: str = "small", target: float = 6.0, **changes) -> StudyData:
    raw: dict[str, Any] = {
        "name": name,
        "workload": {
            "model": {"from_config": {"model_type": "gpt2", "n_head": None}},
            "tokenizer": {"kind": "char"},
            "dataset": {"builtin": "python-docs"},
            "sequence_length": 64,
            "training_arguments": {"max_grad_norm": 0.5},
        },
        "target": {"perplexity": target},
        "search": {
            "space": {
                "global_batch_size": {"choices": [8, 16]},
                "learning_rate": {"low": 1e-5, "high": 1.0, "log": True},
                "epochs": {"choices": [1, 2]},
            }
        },
        "budget": {"trials": 5},
        "carbon": {"country": "USA", "intensity_g_co2e_per_kwh": INTENSITY_G_PER_KWH, "pue": 1.1},
        "launch": {"kind": "local", "gpus": [0]},
    }
    raw |= changes.pop("raw", {})
    replayed = raw["launch"]["kind"] == "replay"
    values: dict[str, Any] = {
        "config": parse_study(raw, "test"),
        "records": records,
        "sessions": (
            SessionLedger(started_at="2026-01-01T00:00:00Z", duration_s=70.0, gap_kwh=1e-5),
        ),
        "provenance": Provenance(
            hardware=Hardware(cpu="a CPU", cpu_cores=8, ram_gib=64, gpus=("a GPU",), driver="1.2"),
            versions={"torch": "2.13.0"},
            intensity=Intensity(
                g_co2e_per_kwh=INTENSITY_G_PER_KWH, source="given in the study file"
            ),
            energy_source=(
                {"gpu": "recorded"} if replayed else {"gpu": "measured", "cpu": "modelled"}
            ),
            study_file=f"name: {name}\n",
        ),
        "ended": "all trials done",
    }
    return StudyData(**{**values, **changes})


def pruned(number: int, last_perplexity: float | None = 12.0) -> TrialRecord:
    evals = (evaluation(last_perplexity, tokens=None),)
    return trial(
        number, 2e-4, None, state=TrialState.PRUNED, stop_reason=StopReason.TARGET, evals=evals
    )


def many(count: int) -> StudyData:
    """As searches leave them: half of the trials are stopped, some fail, and three seeds of one
    configuration.
    """
    chance = random.Random(0)
    records: list[TrialRecord] = []
    for number in range(count):
        batch, rate, epochs = (
            chance.choice([16, 32, 64]),
            10 ** chance.uniform(-4, -2),
            chance.choice([1, 2, 4]),
        )
        params = {"global_batch_size": batch, "learning_rate": rate, "epochs": epochs}
        kwh = (0.5 + 30 / batch) * epochs * 1e-3 * chance.uniform(0.9, 1.1)
        perplexity = (
            4 + abs(math.log10(rate / 1e-3)) + 3 / epochs * chance.uniform(0.9, 1.1) + batch / 200
        )
        kind = chance.random() if number > 3 else 1.0
        if kind < 0.5:
            records.append(
                pruned(number, 1.5 * perplexity).model_copy(
                    update={"emissions_kg_co2e": 0.05 * kwh}
                )
            )
        elif kind < 0.55:
            changes = {"state": TrialState.INFEASIBLE, "evals": (), "params": params}
            records.append(trial(number, kwh / 9, None, **changes))
        elif kind < 0.6:
            last = evaluation(2 * perplexity, tokens=1)
            records.append(
                trial(
                    number, kwh / 5, None, state=TrialState.DIVERGED, params=params, evals=(last,)
                )
            )
        else:
            records.append(trial(number, kwh, perplexity, params=params))
    return study(*records, target=5.8)


def probe(number: int, joules: float = 200.0, **changes) -> TrialRecord:
    """A first step that takes half of its energy, and 20 that take a hundredth each."""
    energy_kwh = kwh_from_joules(joules)
    stages = {
        Stage.COMPILE: StageCost(duration_s=1.0, energy_kwh=0.5 * energy_kwh),
        Stage.STEPS: StageCost(duration_s=2.0, energy_kwh=0.2 * energy_kwh),
    }
    values: dict[str, Any] = {
        "state": TrialState.PRUNED,
        "stop_reason": StopReason.PROBE,
        "energy_kwh": Energy(
            train=0.7 * energy_kwh, setup=0.3 * energy_kwh, eval=0.0, total=energy_kwh
        ),
        "emissions_kg_co2e": None,
        "evals": (),
        "stages": stages,
        "steps_done": 21,
        "peak_memory_gib": 3.5,
    }
    return trial(number, 0.0, None, **{**values, **changes})


def on_gpu(
    number: int, joules: float = 10e3, *, disagreement: float = 0.005, **changes
) -> TrialRecord:
    """A trial whose GPU energy was read twice; its training took 30 s, in which the GPU uses 3 kJ
    idle.
    """

    def twice(energy_j: float, idle_j: float) -> GpuEnergy:
        return GpuEnergy(
            counter=kwh_from_joules(energy_j),
            codecarbon=kwh_from_joules(energy_j * (1 + disagreement)),
            idle=kwh_from_joules(idle_j),
            uncertainty=kwh_from_joules(25),
        )

    split = {
        Phase.SETUP: twice(1e3, 500),
        Phase.TRAIN: twice(joules, 3e3),
        Phase.EVAL: twice(500, 100),
    }
    train = {"train_gpu": joules, "train_cpu": 100.0, "train_ram": 900.0}
    parts = {"train": sum(train.values()), "setup": 1e3, "eval": 500.0, **train}
    parts["total"] = parts["train"] + 1.5e3
    energy = Energy(**{name: kwh_from_joules(energy_j) for name, energy_j in parts.items()})
    duration = Durations(train=30, setup=5, eval=1, total=36)
    values = {
        "energy_kwh": energy,
        "gpu_energy_kwh": split,
        "gpu_disagreement": disagreement,
        "duration_s": duration,
    }
    return trial(number, energy.train, **{**values, **changes})


def gpu_study(*records: TrialRecord, outer: float = 1.0, **changes) -> StudyData:
    """With a session's own 300 J and idle power; one outer reading says `outer` times what the
    parts add up to.
    """
    spent_kwh = kwh_from_joules(300) + sum(record.spent_gpu_kwh or 0.0 for record in records)
    session = SessionLedger(
        started_at="2026-01-01T00:00:00+00:00",
        duration_s=70.0,
        gap_kwh=kwh_from_joules(300),
        outer_kwh=kwh_from_joules(300) + sum(record.spent_kwh for record in records),
        prepare_gpu_kwh=0.0,
        gap_gpu_kwh=kwh_from_joules(300),
        outer_gpu_kwh=outer * spent_kwh,
        idle=(IdlePower(gpu=0, power_w=100.0, spread_w=0.72, windows=5, tick_s=0.1),),
    )
    known = {"cpu": "modelled", "ram": "modelled", "gpu": "measured"}
    provenance = study().provenance.model_copy(update={"energy_source": known})
    return study(*records, **{"sessions": (session,), "provenance": provenance, **changes})


REPLAY: dict[str, Any] = {
    "workload": None,
    "launch": {"kind": "replay", "table": "/somewhere/runs.jsonl"},
}
SAME: dict[str, Any] = {"params": {"learning_rate": 2e-3}}
TRACE = CarbonTrace(
    source="grid.csv", start="2026-01-01T00:00:00+00:00", g_co2e_per_kwh=(100.0, None, 400.0)
)


def on_two_machines() -> StudyData:
    """Two trials on all four GPUs, and one on the first machine's two, which left the other idle."""

    def part(record: TrialRecord, name: str, share: float) -> NodeReadings:
        values = record.energy_kwh.model_dump(exclude_none=True)
        own = {key: share * value for key, value in values.items()}
        return NodeReadings(name=name, devices=(f"{name}-0", f"{name}-1"), readings=Energy(**own))

    def over(number: int, world_size: int, shares: tuple[float, float]) -> TrialRecord:
        record = trial(number, params={"world_size": world_size, "micro_batch_size_per_gpu": 4})
        names = zip(("node1", "node2"), shares, strict=True)
        nodes = tuple(part(record, name, share) for name, share in names)
        return record.model_copy(update={"nodes": nodes})

    launch = {"kind": "slurm", "nodes": 2, "gpus_per_node": 2}
    records = (over(0, 4, (0.5, 0.5)), over(1, 4, (0.5, 0.5)), over(2, 2, (1.0, 0.0)))
    return study(*records, raw={"launch": launch})


# ------------------------------------------------------------------------------------------------------
# scripts

BLEU, WER = (
    quality_of("bleu", "maximize"),
    quality_of("wer", "minimize"),
)  # that carbonopt knows nothing of


def script_run(
    number: int, value: float | None, train_kwh: float = 1e-3, *, quality: Quality = BLEU, **changes
):
    """A trial of a script without carbonopt's lines: the whole process counts as its training, with
    one evaluation at its end. `own`: values of the user's own dimensions. Without a value it
    diverged.
    """
    point = EvalPoint.of(
        quality, math.nan if value is None else quality.mean_of(value), 1, step=1, tokens=None
    )
    rate, own = 1e-3 * (1 + number), changes.pop("own", {})
    values: dict[str, Any] = {
        "state": TrialState.DIVERGED if value is None else TrialState.COMPLETE,
        "quality": (
            QualityResult.named(quality).model_copy(
                update={"value": value, "sum": point.sum, "count": 1}
            )
        ),
        "energy_kwh": Energy(
            train=train_kwh, setup=0, eval=0, total=train_kwh, train_cpu=train_kwh
        ),
        "duration_s": Durations(train=60, setup=0, eval=0, total=60),
        "stages": {Stage.IMPORTS: StageCost(duration_s=60, energy_kwh=train_kwh)},
        "evals": () if value is None else (point,),
        "total_steps": 1,
    }
    record = trial(number, train_kwh, None, **{**values, **changes})
    params = TrialParams(learning_rate=rate, zero_stage=None, offload=None, **own)
    return record.model_copy(update={"params": params})


def script_study(*records: TrialRecord, **changes) -> StudyData:
    """Of a script, train.py. `target`, `space` and `workload` of the study file; the latter two
    beside what is here.
    """
    command = "python train.py --lr {learning_rate}"
    raw = {
        "workload": {
            "task": "script",
            "command": command,
            "folder": "/srv/trainings",
            **changes.pop("workload", {}),
        },
        "target": changes.pop("target", {"quality": "bleu", "at_least": 20}),
        "search": {
            "space": {
                "learning_rate": {"low": 1e-4, "high": 1.0, "log": True},
                **changes.pop("space", {}),
            }
        },
        "launch": {"kind": "local", "gpus": []},
    }
    provenance = study().provenance.model_copy(
        update={"energy_source": {"cpu": "modelled", "ram": "modelled"}}
    )
    return study(*records, **{"raw": raw, "provenance": provenance, **changes})


# ------------------------------------------------------------------------------------------------------
# rewards


def rewarded(number: int, *evaluations: tuple[float, dict[str, float]], **changes) -> TrialRecord:
    """A trial that learnt from a reward, evaluated on 50 prompts every 10 steps; of each evaluation
    the reward, and what was found beside it.
    """
    evals = tuple(
        EvalPoint.of(REWARD, 50 * reward, 50, step=10 * (index + 1), tokens=None, **beside)
        for index, (reward, beside) in enumerate(evaluations)
    )
    reached = QualityResult(name=REWARD.name, value=evals[-1].value, sum=evals[-1].sum, count=50)
    values = {"quality": reached, "evals": evals, "total_steps": 10 * len(evals), **changes}
    return trial(number, values.pop("train_kwh", 1e-3), None, **values)


def beside(gold_reward: float | None, kl_nats: float, tokens: float = 8.0) -> dict[str, float]:
    """What an evaluation finds beside the reward; `tokens` of a completion."""
    others = {"kl_nats": kl_nats, "completion_tokens": tokens}
    return others if gold_reward is None else {"gold_reward": gold_reward, **others}


# What it stands for fell in the first, which is cheaper.
HACKED = rewarded(
    0, (0.2, beside(0.3, 0.5)), (0.5, beside(0.45, 2.0)), (0.9, beside(0.1, 9.0, 15.5))
)
HONEST = rewarded(1, (0.3, beside(0.35, 0.6)), (0.7, beside(0.6, 3.0, 9.0)), train_kwh=2e-3)


def reward_study(*records: TrialRecord, target: float = 0.5, **changes) -> StudyData:
    raw = {
        "workload": {
            "task": "rlhf",
            "model": {"name_or_path": "policy"},
            "dataset": {"builtin": "python-docs"},
            "sequence_length": 64,
            "max_completion_length": 16,
            "reward": {"model": "reward"},
        },
        "target": {"reward": target},
        "launch": {"kind": "local", "gpus": [0]},
    }
    return study(*records, **{"raw": raw, **changes})

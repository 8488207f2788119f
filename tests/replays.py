"""A small study over recorded runs that are made here."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

BATCHES, RATES, EPOCHS = (16, 32, 64), (1e-4, 1e-3, 4e-3), (1, 2, 4)


def recorded_nll(batch: int, rate: float, epochs: float, fraction: float) -> float:
    """A made-up but sensible loss curve: better with more steps and with the middle learning rate."""
    steps = 6400 / batch * epochs
    return 1.0 + 0.25 * abs(math.log10(rate / 1e-3)) + 12 / math.sqrt(steps * fraction)


def write_table(folder: Path, rates: Sequence[float] = RATES) -> Path:
    """Nine recorded runs for each rate, 4 evaluations each."""
    lines = []
    for batch in BATCHES:
        for rate in rates:
            for epochs in EPOCHS:
                total = 6400 // batch * epochs
                evals = [
                    {"step": total * k // 4, "nll": recorded_nll(batch, rate, epochs, k / 4)}
                    for k in (1, 2, 3, 4)
                ]
                lines.append(
                    {
                        "params": {
                            "global_batch_size": batch,
                            "learning_rate": rate,
                            "epochs": epochs,
                        },
                        "seed": 0,
                        "total_steps": total,
                        "joules_per_step": 0.5 + batch / 64,
                        "seconds_per_step": 0.01,
                        "joules_per_eval": 2.0,
                        "evals": evals,
                    }
                )
    path = folder / "table.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def study_over(table: Path, rates: Sequence[float] = RATES) -> dict:
    """A study over that table, as plain data."""
    return {
        "name": "replayed",
        "target": {"perplexity": math.exp(1.9)},
        "search": {
            "space": {
                "global_batch_size": {"choices": list(BATCHES)},
                "learning_rate": {"choices": list(rates)},
                "epochs": {"choices": list(EPOCHS)},
            }
        },
        "budget": {"trials": 12},
        "carbon": {"intensity_g_co2e_per_kwh": 500, "pue": 1.2},
        "launch": {"kind": "replay", "table": str(table)},
    }

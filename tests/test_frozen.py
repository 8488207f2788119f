"""The figures of an earlier carbonopt, to the last digit, from three studies that it ran: a small
one on a CPU, a replay with `confirm`, and the one on an H200 that reports/ shows (tests/frozen).
"""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData

FROZEN = Path(__file__).parent / "frozen"

# What keys were called when these files were written.
RENAMED = {
    "answers": "recommendation_by_target",
    "returns": "diminishing_returns",
    "set_aside": "rejected",
    "lost_repeats": "failed_replicates",
    "lost": "failed_replicate",
    "holds": "confirmed",
    "runner_up": "safer_alternative",
    "perplexity": "value",
    "from_perplexity": "from_value",
    "perplexity_mean": "value_mean",
    "geometric_mean": "value_mean",
    "perplexity_deviation": "value_deviation",
    "perplexity_bound": "value_bound",
    "perplexity_difference": "value_difference",
    "missing_nll": "missing_loss",
    "fell_by_nll": "fell_by_loss",
    "lowest_perplexity": "best_value",
    "lowest_at_step": "best_at_step",
    "core_wait": "cpu_wait_fraction",
    "known": "energy_source",
    "rivals": "runners_up",
}


def frozen(name: str) -> Any:
    return json.loads(gzip.decompress((FROZEN / f"{name}.json.gz").read_bytes()))


def study_data(name: str) -> StudyData:
    raw = frozen(f"{name}-study")
    raw["provenance"]["energy_source"] = raw["provenance"].pop("known")
    if raw["config"]["confirm"]:
        raw["config"]["confirm"]["runners_up"] = raw["config"]["confirm"].pop("rivals")
    if prepared := raw["prepared"]:
        for part in ("train", "eval"):
            prepared[f"{part}_examples"] = prepared.pop(f"{part}_sequences")
    for record in raw["records"]:
        record["cpu_wait_fraction"] = record.pop("core_wait")
        value, total, count = (record.pop(key) for key in ("perplexity", "nll_sum", "eval_tokens"))
        record["quality"] = {"name": "perplexity", "value": value, "sum": total, "count": count}
        for point in record["evals"]:
            point["sum"], point["count"] = point.pop("nll_sum"), point.pop("eval_tokens")
            point["value"] = math.exp(point["sum"] / point["count"])
    return StudyData.model_validate(raw)


def renamed(value: Any, path: str = "") -> Any:
    if isinstance(value, list):
        return [renamed(item, path) for item in value]
    if not isinstance(value, dict):
        return value
    new = {RENAMED.get(key, key): renamed(item, f"{path}.{key}") for key, item in value.items()}
    if path == ".returns":
        new["best"] = new.pop("lowest")
    return new


def without_intervals_of_one(was: Any, study: StudyData) -> Any:
    """Where one configuration alone had a value, an interval would be its repeats', and none is
    stated any more.
    """
    trained = [
        record
        for record in study.records
        if record.state == "complete" and record.repeat_of is None
    ]
    for objective in was.get("influence") or ():
        for parameter in objective.get("parameters", ()):
            values = [getattr(record.params, parameter["name"]) for record in trained]
            for effect in parameter["effects"]:
                if values.count(effect["value"]) == 1:
                    effect |= {"lowest": None, "highest": None}
    return was


def without_what_a_replay_cannot_know(was: Any) -> Any:
    """Leave out its phases beside training and evaluation, and that its learning rate falls."""
    if was["diminishing_returns"] is not None:
        was["diminishing_returns"]["rate_decays"] = False
    spent = was["spent"]
    spent["by_phase_kwh"] |= dict.fromkeys(("prepare", "gap", "setup"))
    spent["gpu_parts_kwh"] |= dict.fromkeys(("prepare", "gap"))
    return was


def differences(was: Any, now: Any, path: str) -> list[str]:
    """Where a number is another one, or is gone; words may be others."""
    if isinstance(was, dict) and isinstance(now, dict):
        return [
            difference
            for key in was
            for difference in differences(was[key], now.get(key), f"{path}.{key}")
        ]
    if path.endswith(".break_even_interval") and was is not None:
        # It left out the error of the start's own emissions, and was too narrow.
        wider = now[0] <= was[0] and (now[1] is None or (was[1] is not None and was[1] <= now[1]))
        return [] if wider else [f"{path}: {was!r} was, {now!r} is no wider"]
    if path.endswith((".both_stopped.lowest", ".both_stopped.highest")) and was is not None:
        # They left out the error between runs, and were too narrow.
        wider = now <= was if path.endswith("lowest") else now >= was
        return [] if wider else [f"{path}: {was!r} was, {now!r} is no wider"]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return [
            difference
            for at, (a, b) in enumerate(zip(was, now, strict=True))
            for difference in differences(a, b, f"{path}[{at}]")
        ]
    same = isinstance(now, str) if isinstance(was, str) else was == now
    if isinstance(was, float) and isinstance(now, float):
        # Sums in another order differ by a last digit; those of models, whose shares are of 1, by
        # CPU.
        rel_tol, abs_tol = (1e-9, 1e-15) if ".influence" in path else (1e-14, 0.0)
        same = math.isclose(was, now, rel_tol=rel_tol, abs_tol=abs_tol)
    return [] if same else [f"{path}: {was!r} was, {now!r} is"]


@pytest.mark.parametrize("name", ["demo", "replay-confirm", "h200"])
@pytest.mark.slow
def test_every_number_of_a_report_is_as_it_was(name: str) -> None:
    study = study_data(name)
    was = without_intervals_of_one(renamed(frozen(f"{name}-report")), study)
    if study.provenance.is_replay:
        was = without_what_a_replay_cannot_know(was)
    now = json.loads(json.dumps(StudyView(study).results()))
    answer = now["recommendation"]
    answer |= {"value": answer["quality"]["value"]}
    answer |= {"target_perplexity": answer["target"]["at_most"]}
    assert differences(was, now, name) == []

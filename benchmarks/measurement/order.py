"""Whether a trial's joules depend on the one before: trials follow each other within a second on a
hot GPU.

    python benchmarks/measurement/order.py OUT.json [--study STUDY.yaml] [--gpus 0] [--rounds 8]
        [--seed 0]

Trains all configurations of the study's space, a few that heat the GPU differently (by choices
alone), in a random order, --rounds times. Then ln(J of the training) is explained by the
configuration and by the GPU's temperature as the training began (on a CPU by the mean power of the
trial before): by least squares. Prints what ten degrees make of a trial's joules, and what the
hottest begin makes against the coldest, with 95 % intervals (Student's t).
"""

import math

import common
import numpy as np
from scipy import stats

from carbonopt.space.search_space import SearchSpace


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    options = parser.parse_args()
    config = common.study(options.study, options.gpus)
    combinations = (
        SearchSpace(config.search.space, config.launch.world_size, bool(options.gpus)).combinations
        or []
    )
    if len(combinations) < 2:
        parser.error("the study's space must have two configurations and more, by choices")
    rounds = np.tile(np.arange(len(combinations)), options.rounds)
    order = np.random.default_rng(options.seed).permutation(rounds).tolist()
    records, joules, power_w, begins_c = [], [], [], []
    runs = [common.Run(dict(combinations[index]), seed) for seed, index in enumerate(order)]
    for record, idle in common.trained(config, runs):
        if record.failure is not None:
            raise SystemExit(record.failure.text)
        joules.append(common.train_joules(record))
        power_w.append(joules[-1] / record.duration_s.train)
        begins_c.append(record.gpu_start_temperature_c)
        began = "" if begins_c[-1] is None else f" from {begins_c[-1]:.0f} °C"
        print(
            f"{len(joules)} of {len(order)}: {joules[-1]:.1f} J, {power_w[-1]:.0f} W{began}",
            flush=True,
        )
        records.append(record.as_json())
        common.write(options.out, options.gpus, {"idle": idle, "order": order, "trials": records})
    if None in begins_c:
        print(effect(order[1:], joules[1:], power_w[:-1], "W of the trial before", 100))
    else:
        print(effect(order, joules, begins_c, "°C at its begin", 10))


def effect(
    order: list[int], joules: list[float], before: list[float], unit: str, each: float
) -> str:
    """Of what was before a trial, in words."""
    cause = np.array(before)
    own = np.eye(max(order) + 1)[order]
    columns = np.column_stack([own, cause - cause.mean()])
    y = np.log(joules)
    fitted, *_ = np.linalg.lstsq(columns, y, rcond=None)
    degrees = len(y) - columns.shape[1]
    variance = float(((y - columns @ fitted) ** 2).sum()) / degrees
    error = math.sqrt(variance * np.linalg.inv(columns.T @ columns)[-1, -1])
    half = float(stats.t.ppf(0.975, degrees)) * error
    slope, span = float(fitted[-1]), float(np.ptp(cause))
    return (
        f"{each} {unit} more make {each * slope:+.2%} (± {each * half:.2%}, 95 %) of a trial's"
        f" joules; from {cause.min():.0f} to {cause.max():.0f}, {span * slope:+.2%} (±"
        f" {span * half:.2%}); {len(y)} trials of {own.shape[1]} configurations, which else differ"
        f" by {math.sqrt(variance):.2%}"
    )


if __name__ == "__main__":
    main()

"""Whether a trial's joules depend on the one before: trials follow each other within a second on a hot GPU.

    python benchmarks/measurement/order.py OUT.json --study STUDY.yaml [--gpus 0] [--rounds 8] [--seed 0]

Trains all configurations of the study's space, a few that heat the GPU differently (by choices alone), in a random
order, --rounds times. Then ln(J of the training) is explained by the configuration and by the mean power of the trial
before: by least squares, over all trials but the first. Prints what a trial before it that draws the most makes of a
trial's joules, against one that draws the least, with a 95 % interval (Student's t).
"""

import math

import common
import numpy as np
from scipy import stats

from carbonopt.core.space import SearchSpace


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    options = parser.parse_args()
    config = common.study(options.study, options.gpus)
    combinations = SearchSpace(config.search.space, config.launch.world_size, bool(options.gpus)).combinations or []
    if len(combinations) < 2:
        parser.error("the study's space must have two configurations and more, by choices")
    rounds = np.tile(np.arange(len(combinations)), options.rounds)
    order = np.random.default_rng(options.seed).permutation(rounds).tolist()
    records, joules, power_w = [], [], []
    runs = [common.Run(dict(combinations[index]), seed) for seed, index in enumerate(order)]
    for record, idle in common.trained(config, runs):
        if record.failure is not None:
            raise SystemExit(record.failure.text)
        joules.append(common.train_joules(record))
        power_w.append(joules[-1] / record.duration_s.train)
        print(f"{len(joules)} of {len(order)}: {joules[-1]:.1f} J, {power_w[-1]:.0f} W", flush=True)
        records.append(record.as_json())
        common.write(options.out, options.gpus, {"idle": idle, "order": order, "trials": records})
    print(effect(order, joules, power_w))


def effect(order: list[int], joules: list[float], power_w: list[float]) -> str:
    """Of the power before, in words."""
    before = np.array(power_w[:-1])
    span_w = float(before.max() - before.min())
    own = np.eye(max(order) + 1)[order[1:]]
    columns = np.column_stack([own, (before - before.mean()) / span_w])
    y = np.log(joules[1:])
    fitted, *_ = np.linalg.lstsq(columns, y, rcond=None)
    degrees = len(y) - columns.shape[1]
    variance = float(((y - columns @ fitted) ** 2).sum()) / degrees
    error = math.sqrt(variance * np.linalg.inv(columns.T @ columns)[-1, -1])
    half = float(stats.t.ppf(0.975, degrees)) * error
    return (
        f"after a trial of {before.max():.0f} W a trial takes {fitted[-1]:+.2%} (± {half:.2%}, 95 %) of its joules "
        f"against one of {before.min():.0f} W before it; {len(y)} trials of {own.shape[1]} configurations, which else "
        f"differ by {math.sqrt(variance):.2%}"
    )


if __name__ == "__main__":
    main()

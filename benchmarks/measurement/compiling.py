"""Whether a configuration's energy depends on its place in the study, where some compile their
kernels.

    python benchmarks/measurement/compiling.py OUT.json --study STUDY.yaml [--gpus 0] [--orders 10]
        [--without 4] [--batches 16 32] [--epochs 1]

The study's workload is trained once with each batch, with `torch_compile` and without, in --orders
random orders, each beginning with an empty cache of compiled kernels. As a study does, a probe
compiles what a trial would compile; then --without orders more have no probes. Prints, for each
configuration, the energy of its training: mean, standard deviation over the orders, and that of the
orders in which it came first against the others; and in how many orders all rank as their means do.
"""

import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np

from carbonopt.spec.space_settings import Space

Values = dict[str, Any]
Order = list[tuple[str, float]]  # configurations and the joules of their trainings


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--orders", type=int, default=10)
    parser.add_argument("--without", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--epochs", type=float, default=1.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # the trials' processes inherit it
        records, orders = measured(options, Path(folder))
    common.write(options.out, options.gpus, {"trials": records})
    print(
        "| probes | configuration | J | standard deviation | first in its order ÷ otherwise |"
        " orders |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for probes, of_kind in (
        ("with", orders[: options.orders]),
        ("without", orders[options.orders :]),
    ):
        if of_kind:
            print("\n".join(table(of_kind, probes)))


def measured(options: Any, cache: Path) -> tuple[list[Values], list[Order]]:
    config = common.study(options.study, options.gpus)
    raw = config.search.space.model_dump(exclude_none=True)
    space = {name: value for name, value in raw.items() if "value" in value} | {
        "global_batch_size": {"choices": options.batches},
        "learning_rate": 1e-3,
        "epochs": options.epochs,
        "zero_stage": 0,
        "torch_compile": {"choices": [False, True]},
    }
    search = config.search.model_copy(update={"space": Space(**space), "start": None})
    workload = config.workload.model_copy(update={"evaluations": 1})
    config = config.model_copy(update={"search": search, "workload": workload})
    rng = np.random.default_rng(0)
    both = [
        {"global_batch_size": batch, "torch_compile": compiles}
        for batch in options.batches
        for compiles in (False, True)
    ]
    orders = [
        [both[i] for i in rng.permutation(len(both))]
        for _ in range(options.orders + options.without)
    ]
    records: list[Values] = []
    trainings: Order = []
    for record, _ in common.trained(config, runs(orders, options.orders, cache)):
        if record.failure is not None:
            raise SystemExit(record.failure.text)
        records.append(record.as_json())
        if record.stop_reason is None:
            trainings.append((name_of(record.params), common.train_joules(record)))
            print(f"{len(trainings)} of {len(both) * len(orders)}: {trainings[-1]}", flush=True)
    return records, [
        trainings[first : first + len(both)] for first in range(0, len(trainings), len(both))
    ]


def runs(orders: list[list[Values]], with_probes: int, cache: Path) -> Iterator[common.Run]:
    for number, order in enumerate(orders):
        shutil.rmtree(cache)
        cache.mkdir()
        for values in order:
            if values["torch_compile"] and number < with_probes:
                yield common.Run(values, number, probe_s=0.0)
            yield common.Run(values, number)


def name_of(params: Any) -> str:
    return f"batch {params.global_batch_size}{', compiled' if params.torch_compile else ''}"


def table(orders: list[Order], probes: str) -> Iterator[str]:
    means = {name: statistics.fmean(dict(order)[name] for order in orders) for name, _ in orders[0]}
    for name in sorted(means):
        joules = [dict(order)[name] for order in orders]
        first = [dict(order)[name] for order in orders if order[0][0] == name]
        others = [dict(order)[name] for order in orders if order[0][0] != name]
        ratio = (
            f"{statistics.fmean(first) / statistics.fmean(others):.3f}" if first and others else "–"
        )
        spread = statistics.stdev(joules) / means[name] if len(joules) > 1 else 0.0
        yield f"| {probes} | {name} | {means[name]:.4g} | {spread:.1%} | {ratio} | {len(orders)} |"
    expected = sorted(means, key=lambda name: means[name])
    alike = sum(
        sorted(dict(order), key=lambda name, of=dict(order): of[name]) == expected
        for order in orders
    )
    yield f"| {probes} | ranked as by their means | | | | {alike} of {len(orders)} |"


if __name__ == "__main__":
    main()

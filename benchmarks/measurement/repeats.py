"""One configuration over and over, each time with another seed, in a trial's own fresh processes.

python benchmarks/measurement/repeats.py OUT.json [--gpus 0 1] [--repeats 10]
"""

import sys

import common


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    config = common.study(options.study, options.gpus)
    records = []
    for record, idle in common.trained(
        config, [common.Run({}, seed) for seed in range(options.repeats)]
    ):
        if record.failure is not None:
            sys.exit(record.failure.text)
        print(record.value, record.energy_kwh, flush=True)
        records.append(record.as_json())
        common.write(options.out, options.gpus, {"idle": idle, "trials": records})


if __name__ == "__main__":
    main()

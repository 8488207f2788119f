"""What a token costs in each trial of a study: time and energy of its steps after the first, in Markdown.

carbonopt export STUDY_FOLDER --format jsonl | python benchmarks/performance/tokens.py SEQUENCE_LENGTH
"""

import json
import sys

JOULES_PER_KWH = 3.6e6
SHOWN = ("micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_stage", "torch_compile")


def main(sequence_length: int) -> None:
    print(f"| {' | '.join(SHOWN)} | mJ a token | tokens/s | W | first step (s) | peak memory (GiB) |")
    print("| --- " * len(SHOWN) + "| ---: " * 5 + "|")
    for line in sys.stdin:
        record = json.loads(line)
        params, steps = record["params"], record["stages"]["steps"]
        cells = [str(params.get(name, "–")) for name in SHOWN]
        if record["state"] != "complete":
            print(f"| {' | '.join(cells)} | {record['state']} | | | | |")
            continue
        tokens = (record["steps_done"] - 1) * params["global_batch_size"] * sequence_length
        energy_j = steps["energy_kwh"] * JOULES_PER_KWH
        figures = (
            f"{energy_j / tokens * 1000:.3f}",
            f"{tokens / steps['duration_s']:,.0f}",
            f"{energy_j / steps['duration_s']:.0f}",
            f"{record['stages']['compile']['duration_s']:.1f}",
            f"{record['peak_memory_gib']:.1f}",
        )
        print(f"| {' | '.join(cells)} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main(int(sys.argv[1]))

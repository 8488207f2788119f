"""What sampling a batch of completions costs by kind of cache, as TRL's trainers sample them.

    python benchmarks/rlhf/generation.py MODEL [--device cuda:0 --dtype bfloat16] [--batch 64]
        [--prompt 64] [--completion 24]

MODEL is a folder, or a configuration as `workload.model.from_config` has it, such as '{model_type:
gpt2}', whose weights are then random. No completion ends early. Prompts are of random lengths, each
repeated for its completions, so that the longest differs from round to round, as in training. A
round measures every cache on the same prompts, in turn; of a round before them the first call is
shown, which compiles. "Same tokens" is the least share in a round of the tokens that greedy
decoding makes as with the static cache. Joules are those of the GPU's counter, which NVML must know
by the same number as CUDA.
"""

import argparse
import copy
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, GenerationConfig

from carbonopt.energy.counter import EnergyCounters
from carbonopt.train.speed.decoding import GRAPHED, install_token_graph

LEAST_S = 2.0  # of a measurement on a GPU, whose counter ticks every 0.1 s
GRAPH = "static, CUDA graph"  # as the task rlhf has it on a GPU
CACHES = ("dynamic", "static", GRAPH, "static, compiled")


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    model = load(options)
    models = {cache: model for cache in options.caches if cache != GRAPH}
    if GRAPH in options.caches and install_token_graph(
        graphed := copy.copy(model)
    ):  # with the same weights
        models[GRAPH] = graphed
    counters = (
        EnergyCounters([options.device.index or 0]) if options.device.type == "cuda" else None
    )
    rounds = []
    for number in range(options.rounds + 1):
        prompts = random_prompts(options, model.config.get_text_config().vocab_size)
        turn = list(models) if number % 2 == 0 else list(models)[::-1]
        rounds.append(
            {name: measured(models[name], prompts, name, options, counters) for name in turn}
        )
        greedy = {
            name: generated(models[name], prompts, name, options, do_sample=False) for name in turn
        }
        for name in turn:
            rounds[-1][name]["same"] = (greedy[name] == greedy["static"]).float().mean().item()
    print(table(model, options, rounds))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--vocabulary", type=int, default=512, help="of a configuration's model")
    parser.add_argument("--batch", type=int, default=64, help="completions")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the longest")
    parser.add_argument("--completion", type=int, default=24, help="tokens of each")
    parser.add_argument("--pad-to", type=int, default=1, help="TRL's pad_to_multiple_of")
    parser.add_argument(
        "--caches", nargs="+", choices=CACHES, default=CACHES, help="dynamic and static among them"
    )
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def load(options: argparse.Namespace) -> Any:
    dtype = getattr(torch, options.dtype)
    if Path(options.model).is_dir():
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    else:
        config = AutoConfig.for_model(
            **yaml.safe_load(options.model), vocab_size=options.vocabulary
        )
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None  # no completion ends early
    return model.to(options.device).eval()


def kinds(options: argparse.Namespace) -> dict[str, GenerationConfig]:
    """TRL's settings, which never compile, and what transformers does with a static cache on a GPU
    where it may.
    """
    given: dict[str, Any] = {
        "max_new_tokens": options.completion,
        "do_sample": True,
        "top_k": 0,
        "top_p": 1.0,
        "temperature": 1.0,
    }
    given |= {"pad_token_id": 0, "eos_token_id": None}
    compiling = None
    if options.device.type == "cpu":  # where transformers compiles only on request
        compiling = CompileConfig(fullgraph=False)
        compiling._compile_all_devices = True
    return {
        "dynamic": GenerationConfig(**given, disable_compile=True),
        "static": GenerationConfig(**given, cache_implementation="static", disable_compile=True),
        GRAPH: GenerationConfig(**(given | GRAPHED)),
        "static, compiled": GenerationConfig(
            **given, cache_implementation="static", compile_config=compiling
        ),
    }


def random_prompts(options: argparse.Namespace, vocabulary: int) -> dict[str, torch.Tensor]:
    """Padded on the left; [batch, longest]."""
    lengths = torch.randint(
        options.prompt // 2, options.prompt + 1, (options.batch // options.generations,)
    )
    lengths = lengths.repeat_interleave(options.generations)
    width = -(-int(lengths.max()) // options.pad_to) * options.pad_to
    mask = (torch.arange(width)[None] >= width - lengths[:, None]).long()
    tokens = torch.randint(1, vocabulary, mask.shape) * mask
    return {"input_ids": tokens.to(options.device), "attention_mask": mask.to(options.device)}


@torch.no_grad()
def generated(
    model: Any,
    prompts: dict[str, torch.Tensor],
    cache: str,
    options: argparse.Namespace,
    **others: Any,
) -> torch.Tensor:
    """Token ids [batch, longest prompt + completion]."""
    made: torch.Tensor = model.generate(
        **prompts, generation_config=kinds(options)[cache], **others
    )
    return made


def measured(
    model: Any,
    prompts: dict[str, torch.Tensor],
    cache: str,
    options: argparse.Namespace,
    counters: EnergyCounters | None,
) -> dict[str, float]:
    """Seconds and joules of a batch."""
    calls, began_j, began_s = 0, counters.read()[0] if counters else 0.0, time.monotonic()
    while calls == 0 or (counters is not None and time.monotonic() - began_s < LEAST_S):
        generated(model, prompts, cache, options)
        if counters is not None:
            torch.cuda.synchronize()
        calls += 1
        if calls == 1:
            first_s = time.monotonic() - began_s
    taken = {"first_s": first_s, "s": (time.monotonic() - began_s) / calls}
    return taken | ({"j": (counters.read()[0] - began_j) / calls} if counters else {})


def table(
    model: Any, options: argparse.Namespace, rounds: list[dict[str, dict[str, float]]]
) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    device = torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else "CPU"
    first, later = rounds[0], rounds[1:]
    lines = [
        (
            f"{model.config.model_type}, {parameters / 1e6:.2f} million parameters,"
            f" {options.dtype}, {device}: {options.batch} completions of {options.completion}"
            f" tokens, {options.batch // options.generations} prompts of {options.prompt // 2} to"
            f" {options.prompt}; {len(later)} rounds, median (lowest to highest)"
        ),
        "",
        (
            "| cache | seconds a batch | of the dynamic's | tokens/s | J a batch | of the dynamic's"
            " | first call (s) | same tokens |"
        ),
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in first:
        seconds = [taken[name]["s"] for taken in later]
        cells = [
            name,
            spread(seconds),
            spread([taken[name]["s"] / taken["dynamic"]["s"] for taken in later]),
        ]
        cells.append(f"{options.batch * options.completion / median(seconds):,.0f}")
        if "j" in first[name]:
            joules = [taken[name]["j"] for taken in later]
            cells += [
                spread(joules),
                spread([taken[name]["j"] / taken["dynamic"]["j"] for taken in later]),
            ]
        else:
            cells += ["", ""]
        cells += [
            f"{first[name]['first_s']:.2f}",
            f"{min(taken[name]['same'] for taken in rounds):.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()

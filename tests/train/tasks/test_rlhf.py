"""Reinforcement learning: what an evaluation finds, and real trials of tiny models on the CPU."""

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import within
from small_studies import study
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from trial_processes import Run, start

from carbonopt.core.channel import FINISHED_EXIT
from carbonopt.core.errors import BadInput
from carbonopt.core.events import StageBegun
from carbonopt.core.trial import Stage
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.launch_settings import LocalLaunch
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space
from carbonopt.study_file.reader import parse_study
from carbonopt.study_file.study_checks import check
from carbonopt.train.prepare import PrepareSpec, prepare
from carbonopt.train.rewards import load_rewards
from carbonopt.train.tasks.rlhf import RewardSource
from carbonopt.train.tasks.task import task_for

ROOT = Path(__file__).parents[3]
LENGTH, COMPLETION, EVAL_PROMPTS = 12, 8, 7
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 32,
    "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
SPACE = {"global_batch_size": 16, "learning_rate": 1e-3, "epochs": 1, "num_generations": 4}
PARAMS = {
    **SPACE,
    "learning_rate": 1e-2,
    "micro_batch_size_per_gpu": 16,
    "epochs": 1,
    "lr_scheduler": "constant",
}
VOWELS = f"{ROOT / 'studies' / 'vowels.py'}:share_of_vowels"
PROMPTS = [f"{first}{second} or {second}{first}" for first in "abcdefgh" for second in "bdfi"]


def workload(folder: Path, **changes: Any) -> dict[str, Any]:
    for name, prompts in (("train", PROMPTS), ("eval", PROMPTS[3 : 3 + EVAL_PROMPTS])):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        )
    return {
        "task": "rlhf",
        "model": {"from_config": LLAMA},
        "tokenizer": {"kind": "char"},
        "dataset": {
            "train_files": [str(folder / "train.jsonl")],
            "eval_files": [str(folder / "eval.jsonl")],
        },
        "sequence_length": LENGTH,
        "max_completion_length": COMPLETION,
        "reward": {"python": VOWELS},
        "evaluations": 2,
        **changes,
    }


def prepared_in(folder: Path, **changes: Any) -> PreparedFolder:
    space, given = Space.model_validate(SPACE), workload(folder, **changes)
    prepare(
        PrepareSpec(
            workload=given, space=space, prepared_dir=str(folder / "prepared"), fingerprint="f"
        )
    )
    return PreparedFolder(folder / "prepared")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> PreparedFolder:
    return prepared_in(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def trial(prepared, tmp_path_factory):
    def run(seed=0, save=False, at=prepared, **params) -> Run:
        folder = tmp_path_factory.mktemp("trial")
        params = {**PARAMS, **params}
        spec = {
            "number": 0, "attempt": 1, "seed": seed, "params": params, "workload": json.loads(at.workload.read_text()),
            "prepared_dir": str(at.root), "trial_dir": str(folder),
            "saves_model": save,
        }  # fmt: skip
        made = start("rank_main", spec, folder, params.get("world_size", 1))
        assert made.exit_code == FINISHED_EXIT, made.events[-1]
        return made

    return run


def others(run: Run, name: str) -> list[float]:
    return [point.other_qualities[name] for point in run.points]


# -----------------------------------------------------------------------------------------------------------
# rewards


@pytest.mark.parametrize("end", [None, "</s>"])  # the end of a text, where it isn't the padding
@pytest.mark.slow
def test_a_reward_model_scores_as_the_task_reward_has_trained_it(end, tmp_path):
    """Prompt and completion as one text, whichever others are in the batch."""
    from carbonopt.train.data.pair_rows import Pair, tokenized
    from carbonopt.train.data.tokens import TextEncoder

    tokenizer = AutoTokenizer.from_pretrained(prepared_in(tmp_path).tokenizer)
    if end is not None:
        tokenizer.add_special_tokens({"eos_token": end})
    config = AutoConfig.for_model(
        **LLAMA, vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "judge")
    scores = load_rewards(RewardSource(model=str(tmp_path / "judge")), "reward")(
        ["ab ", "cdf"], ["or", "a"]
    )
    encoder = TextEncoder(
        tokenizer,
        lambda texts: (torch.tensor(tokenizer(text)["input_ids"]).numpy() for text in texts),
    )
    rows = tokenized(
        [Pair("ab ", "or", "i", ""), Pair("cdf", "a", "b", "")], encoder, 64, "training"
    ).rows
    with torch.no_grad():
        alone = [
            model(input_ids=torch.tensor(rows[place].tolist())[None]).logits.item()
            for place in (0, 2)
        ]
    assert scores == pytest.approx(alone, abs=1e-5)


def test_a_reward_model_whose_tokenizer_draws_is_refused(tmp_path):
    words = BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")], dropout=0.1)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="</s>").save_pretrained(
        tmp_path
    )
    config = AutoConfig.for_model(**LLAMA, vocab_size=4, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=r"^workload\.reward\.model: .* a BPE dropout of 0\.1;"):
        load_rewards(RewardSource(model=str(tmp_path)), "reward")


def test_a_reward_model_that_diverged_is_refused(tmp_path):
    words = Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(tmp_path)
    config = AutoConfig.for_model(**LLAMA, vocab_size=2, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config)
    model.score.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=r"^workload\.reward\.model: .* 1 tensor: score\.weight;"):
        load_rewards(RewardSource(model=str(tmp_path)), "reward")


@pytest.mark.parametrize("padding", [None, 3])  # in its configuration; its tokenizer has none
def test_a_reward_model_scores_a_text_alike_whatever_its_configuration_pads_with(padding, tmp_path):
    vocabulary = {"?": 0, "</s>": 1, "a": 2, "b": 3}
    letters = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    letters.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>").save_pretrained(tmp_path)
    config = AutoConfig.for_model(
        **LLAMA, vocab_size=len(vocabulary), num_labels=1, pad_token_id=padding
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    scores = load_rewards(RewardSource(model=str(tmp_path)), "reward")
    (alone,) = scores(["ab"], ["a"])
    beside, longer = scores(["ab", "baba"], ["a", "bb"])
    assert beside == pytest.approx(alone, abs=1e-5) and longer != pytest.approx(alone, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "function", "said"),
    [
        (
            "def f(prompts, completions): return [1.0]",
            "f",
            "for each of the 2 completions, but returned",
        ),
        (
            "def f(prompts, completions): return [1.0, float('nan')]",
            "f",
            "one finite number for each of",
        ),
        (
            "def f(prompts, completions): return ['good', 'bad']",
            "f",
            "one finite number for each of",
        ),
        ("def f(prompts, completions): return 1 / 0", "f", "f of .* fails: ZeroDivisionError: "),
        ("def f(prompts): return [1.0] * len(prompts)", "f", "f of .* fails: TypeError: "),
        ("def f(prompts, completions): raise SystemExit(3)", "f", "f of .* fails: SystemExit: 3"),
        ("def f(prompts, completions): return [10**400, 1]", "f", "one finite number for each of"),
        (
            "import itertools\ndef f(prompts, completions): return itertools.count()",
            "f",
            "one finite number for each",
        ),
        ("raise SystemExit(3)", "f", "can't be imported: 3"),
        ("def f(prompts, completions): return [1.0]", "g", "has no function g"),
        ("def f(:", "f", "can't be imported: "),
    ],
)
def test_a_function_that_is_none_is_refused(text, function, said, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(BadInput, match=said):
        load_rewards(RewardSource(python=f"{tmp_path / 'mine.py'}:{function}"), "reward")(
            ["a", "b"], ["c", "d"]
        )


# -------------------------------------------------------------------------------------------------------------
# trials


@pytest.mark.parametrize(
    ("algorithm", "learning_rate"),
    [("grpo", 1e-2), pytest.param("rloo", 3e-3, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_it_learns_and_says_how_far_it_has_gone(algorithm, learning_rate, tmp_path, trial):
    at = prepared_in(tmp_path, algorithm=algorithm, gold_reward={"python": VOWELS})
    run = trial(at=at, epochs=6, learning_rate=learning_rate)
    first, last = run.points
    assert last.count == EVAL_PROMPTS and last.value > 0.6
    assert others(run, "gold_reward") == pytest.approx([first.value, last.value])
    kl, start = others(run, "kl_nats"), others(run, "start_reward")
    assert min(kl) > 0.1
    assert start == others(run, "start_gold_reward") and start[0] == start[1] < first.value
    assert last.other_qualities["completion_tokens"] <= COMPLETION
    generated = others(run, "generated_tokens")
    assert (
        2 * 16 * len(PROMPTS) < generated[1] <= 6 * 4 * len(PROMPTS) * COMPLETION
        and 0 < generated[0] < generated[1]
    )
    stages = [event.stage for event in run.events if isinstance(event, StageBegun)]
    of_steps = [Stage.GENERATION, Stage.STEPS] * (6 * 4 * len(PROMPTS) // 16 - 1)
    assert stages[-len(of_steps) - 1 :] == [Stage.STEPS, *of_steps], "all but the first step's"


@pytest.mark.slow
def test_a_static_cache_makes_the_same_completions(tmp_path, trial):
    (static := tmp_path / "static").mkdir()
    at = prepared_in(static, training_arguments={"cache_implementation": "static"})
    dynamic, static = (
        trial(at=folder, learning_rate=1e-3) for folder in (prepared_in(tmp_path), at)
    )
    assert static.values == dynamic.values
    assert others(static, "generated_tokens") == others(dynamic, "generated_tokens")
    kl = others(dynamic, "kl_nats")
    assert min(kl) > 0 and others(static, "kl_nats") == pytest.approx(kl, rel=1e-4)


def pretrained_with(folder: Path, **own: Any) -> dict[str, Any]:
    """Return a model with random weights and settings of generation of its own."""
    vocabulary = {letter: place for place, letter in enumerate(["?", "</s>", *" abcdefghior"])}
    letters = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    letters.pre_tokenizer = Split("", "isolated")
    special = {"unk_token": "?", "eos_token": "</s>", "pad_token": "?"}
    PreTrainedTokenizerFast(tokenizer_object=letters, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **LLAMA, vocab_size=len(vocabulary), eos_token_id=1, pad_token_id=0
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, **own}))
    return {"model": {"name_or_path": str(folder)}, "tokenizer": None}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_own_settings_of_generation_that_have_no_effect(algorithm, tmp_path, trial):
    runs = []
    for name, own in (
        ("plain", {}),
        ("own", {"return_dict_in_generate": True, "num_beams": 2, "num_return_sequences": 2}),
    ):
        (folder := tmp_path / name).mkdir()
        model = pretrained_with(folder / "model", **own)
        runs.append(trial(at=prepared_in(folder, **model, algorithm=algorithm), learning_rate=1e-3))
    plain, same = runs
    assert same.values == plain.values
    assert others(same, "generated_tokens") == others(plain, "generated_tokens")


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_strings", ["a"]), ("prompt_lookup_num_tokens", 2), ("dola_layers", "low")],
)
def test_own_settings_with_which_no_trial_could_generate_are_refused(name, value, tmp_path):
    model = pretrained_with(tmp_path / "model", **{name: value})
    with pytest.raises(BadInput, match=f"take {name} out"):
        prepared_in(tmp_path, **model)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"beta": 0.1}, "use search.space.kl_coefficient"),
        ({"temperature": 0.9}, "use workload.temperature"),
        ({"generation_batch_size": 64}, "use steps_per_generation"),
        ({"cache_implementaton": "static"}, "did you mean cache_implementation"),
    ],
)
def test_arguments_of_trl_are_checked_as_those_of_transformers(given, said, tmp_path):
    with pytest.raises(BadInput, match=said):
        prepared_in(tmp_path, training_arguments=given)


@pytest.fixture(scope="module")
def barely_trained(trial, tmp_path_factory):
    """The trial of an algorithm with ZeRO 1 at a learning rate of nothing."""

    @functools.cache
    def run(algorithm: str) -> Run:
        at = prepared_in(tmp_path_factory.mktemp("base"), algorithm=algorithm)
        return trial(at=at, learning_rate=1e-12, zero_stage=1)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "params"),
    [
        ("grpo", {"zero_stage": 0}),
        ("grpo", {"zero_stage": 2, "micro_batch_size_per_gpu": 8}),
        ("grpo", {"zero_stage": 3}),
        ("grpo", {"zero_stage": 0, "world_size": 2, "micro_batch_size_per_gpu": 8}),
        ("grpo", {"zero_stage": 2, "world_size": 2, "micro_batch_size_per_gpu": 8}),
        ("grpo", {"zero_stage": 3, "world_size": 2, "micro_batch_size_per_gpu": 4}),
        ("grpo", {"zero_stage": 2, "lora_rank": 4}),
        ("grpo", {"zero_stage": 3, "lora_rank": 4}),
        ("grpo", {"zero_stage": 0, "kl_coefficient": 0.0}),
        ("grpo", {"zero_stage": 0, "kl_coefficient": 0.0, "lora_rank": 4}),
        ("rloo", {"zero_stage": 0}),
        ("rloo", {"zero_stage": 3, "world_size": 2, "micro_batch_size_per_gpu": 4}),
        ("rloo", {"zero_stage": 0, "kl_coefficient": 0.0, "lora_rank": 4}),
    ],
    ids=str,
)
def test_the_model_that_it_begins_with_is_told_alike(
    algorithm, params, tmp_path, trial, barely_trained
):
    """Reward and divergence at a learning rate of nothing, whatever else is set."""
    run = trial(at=prepared_in(tmp_path, algorithm=algorithm), **{**params, "learning_rate": 1e-12})
    base = barely_trained(algorithm)
    assert [point.value for point in run.points] == pytest.approx(
        [point.value for point in base.points], abs=1e-3
    )
    assert others(run, "kl_nats") == pytest.approx([0, 0], abs=1e-4)
    assert others(run, "start_reward") == pytest.approx(
        [point.value for point in run.points], abs=1e-3
    )


@pytest.mark.slow
def test_plain_transformers_finds_the_same_on_the_saved_model(prepared, trial):
    run = trial(save=True, epochs=2)
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    model = AutoModelForCausalLM.from_pretrained(run.folder / "model").eval()
    texts = json.loads((prepared.root / "eval.json").read_text())
    completions = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            made = model.generate(input_ids=ids, do_sample=False, max_new_tokens=COMPLETION)
        completions.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    rewards = load_rewards(RewardSource(python=VOWELS), "reward")(texts, completions)
    assert run.points[-1].value == pytest.approx(sum(rewards) / len(texts), abs=1e-3)


# ----------------------------------------------------------------------------------------------------------
# the study


@pytest.mark.parametrize(
    ("changes", "space", "said"),
    [
        ({}, {"num_generations": 5}, "must be a multiple of num_generations, but got 16 and 5"),
        ({}, {"num_generations": 1}, "search.space.num_generations: must be"),
        ({}, {"kl_coefficient": -0.1}, "search.space.kl_coefficient: must be"),
        ({"reward": {}}, {}, "must have exactly one of model, python"),
        ({"reward": {"python": "vowels.py"}}, {}, "python must be FILE.py:FUNCTION"),
        ({"temperature": 0.0}, {}, "temperature must be above 0"),
        ({"algorithm": "ppo"}, {}, "workload.algorithm"),
        ({"task": "dpo"}, {}, "workload"),
    ],
)
def test_settings_that_can_not_be_are_refused(changes, space, said, tmp_path):
    raw = study().config.model_dump(mode="json", exclude_none=True)
    given = {**workload(tmp_path), **changes}
    raw |= {"target": {"reward": 0.5}, "workload": given, "search": {"space": {**SPACE, **space}}}
    with pytest.raises(BadInput) as refused:
        SearchSpace(parse_study(raw, "study.yaml").search.space, world_size=1, on_gpu=False)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "space", "said"),
    [
        ({}, {"num_generations": None}, "search.space.num_generations is missing"),
        (
            {"reward": {"python": "/nowhere/mine.py:f"}},
            {},
            "workload.reward.python: no file /nowhere/mine.py",
        ),
        (
            {"gold_reward": {"python": "/nowhere/mine.py:f"}},
            {},
            "workload.gold_reward.python: no file",
        ),
        (
            {"training_arguments": {"use_vllm": True}},
            {},
            "use_vllm needs vLLM, which is not installed",
        ),
    ],
)
def test_what_is_not_there_is_said_before_anything_is_started(changes, space, said, tmp_path):
    with pytest.raises(BadInput, match=said):
        task_for(workload(tmp_path, **changes)).check(
            Space.model_validate({**SPACE, **space}), LocalLaunch(gpus=())
        )


def test_a_reward_model_that_is_not_there_is_said_before_anything_is_started(tmp_path):
    raw = study().config.model_dump(mode="json", exclude_none=True)
    given = {**workload(tmp_path), "reward": {"model": "/nowhere"}}
    raw |= {
        "target": {"reward": 0.5},
        "workload": given,
        "search": {"space": SPACE},
        "launch": {"gpus": []},
    }
    raw["launch"]["kind"] = "local"
    with pytest.raises(BadInput, match=r"workload\.reward\.model: no folder /nowhere"):
        check(parse_study(raw, "study.yaml"))


@pytest.mark.parametrize(
    ("changes", "space", "said"),
    [
        ({"sequence_length": 3}, {}, "each of the 32 training prompts is longer than 3 tokens"),
        (
            {"max_completion_length": 60},
            {},
            "at most the model's number of positions, but got 12 .* 60 and 64",
        ),
        ({}, {"max_completion_length": 60}, "at most the model's number of positions"),
        ({}, {"output_layer": "fused"}, "output_layer must be standard"),
        (
            {"training_arguments": {"cache_implementation": "statik"}},
            {},
            "not what generating takes: .*statik",
        ),
        (
            {"training_arguments": {"generation_kwargs": {"disable_compile": False}}},
            {},
            "disable_compile",
        ),
        ({"training_arguments": {"generation_kwargs": [1, 2]}}, {}, "not what generating takes"),
        (
            {"training_arguments": {"generation_kwargs": {"topk": 5}}},
            {},
            "topk; did you mean top_k",
        ),
        (
            {"training_arguments": {"generation_kwargs": {"num_beams": 2}}},
            {},
            "num_beams can't be given",
        ),
    ],
)
def test_what_no_trial_could_use_is_refused(changes, space, said, tmp_path):
    (folder := tmp_path / "prepared").mkdir()
    with pytest.raises(BadInput, match=said):
        task_for(workload(tmp_path, **changes)).prepare(
            Space.model_validate({**SPACE, **space}), PreparedFolder(folder), "f"
        )


@pytest.mark.slow
def test_the_shipped_study_runs_to_its_end_and_its_winner_is_found_again(tmp_path):
    done = within("run", ROOT / "studies" / "rlhf.yaml", "--out", tmp_path / "out", "--trials", "1")
    assert done.returncode == 0, done.stderr
    exported = within("export", tmp_path / "out").stdout.splitlines()
    records = {record["trial"]: record for record in map(json.loads, exported)}
    recommended = json.loads(within("recommend", tmp_path / "out", "--json").stdout)
    assert len(records) == 1 and recommended["met"]
    record = records[recommended["trial"]]
    assert record["quality"]["name"] == "reward" and record["quality"]["value"] >= 0.6
    assert record["stages"]["generation"]["duration_s"] > 0
    winner = tmp_path / "out" / "report" / "winner"
    assert str(ROOT) not in (winner / "workload.yaml").read_text()
    (winner / "data").mkdir()
    (winner / "data" / "vowels.py").write_bytes((ROOT / "studies" / "vowels.py").read_bytes())
    again = subprocess.run(
        ["sh", "run.sh"], cwd=winner, capture_output=True, text=True, timeout=200
    )
    assert again.returncode == 0, again.stderr
    result = json.loads((winner / "output" / "result.json").read_text())
    assert result["quality"]["value"] == pytest.approx(record["quality"]["value"], abs=1e-3)

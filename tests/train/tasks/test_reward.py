"""Reward models: what becomes of pairs of answers, and real trials of tiny models on the CPU."""

import json
import math
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import within
from small_studies import study
from tokenizers import Tokenizer, models, pre_tokenizers
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
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space
from carbonopt.spec.trial_spec import Prepared
from carbonopt.study_file.reader import parse_study
from carbonopt.train.data.pair_rows import PairExamples
from carbonopt.train.data.rows import file_rows
from carbonopt.train.prepare import PrepareSpec, prepare
from carbonopt.train.tasks.reward import Reward
from carbonopt.train.tasks.task import task_for

ROOT = Path(__file__).parents[3]
LENGTH, EVAL_PAIRS = 40, 21
GPT2 = {
    "model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": LENGTH, "initializer_range": 0.1,
    # or each division drops other activations
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 32,
    "max_position_embeddings": LENGTH, "initializer_range": 0.1,
}  # fmt: skip
SPACE = {"global_batch_size": 8, "learning_rate": 1e-3, "epochs": 1}
PARAMS = {"global_batch_size": 8, "micro_batch_size_per_gpu": 8, "learning_rate": 1e-2, "epochs": 1}
PAIR = {"prompt": "How much? ", "chosen": "a lot", "rejected": "none"}


def pairs(count: int) -> list[dict[str, str]]:
    """The chosen answer has more vowels; they differ in length, so that every batch is ragged."""
    random = np.random.default_rng(count)

    def word(letters: str) -> str:
        return "".join(random.choice(list(letters), random.integers(3, 17)))

    return [
        {"prompt": "say: ", "chosen": word("aeioubcd"), "rejected": word("aebcdfgh")}
        for _ in range(count)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def workload(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "task": "reward",
        "model": {"from_config": GPT2},
        "tokenizer": {"kind": "char"},
        "dataset": {
            "train_files": [write_jsonl(folder / "train.jsonl", pairs(160))],
            "eval_files": [write_jsonl(folder / "eval.jsonl", pairs(EVAL_PAIRS))],
        },
        "sequence_length": LENGTH,
        "evaluations": 2,
        **changes,
    }


def prepared_from(
    folder: Path, rows: list[dict[str, Any]], **changes: Any
) -> tuple[Prepared, PreparedFolder]:
    """Of the same rows for training and for evaluation."""
    path = write_jsonl(folder / "pairs.jsonl", rows)
    dataset = {"train_files": [path], "eval_files": [path], **changes.pop("dataset", {})}
    made = PreparedFolder(Path(tempfile.mkdtemp(dir=folder)))
    given = {
        "task": "reward",
        "model": {"from_config": GPT2},
        "tokenizer": {"kind": "byte"},
        "sequence_length": LENGTH,
    }
    space = Space.model_validate({**SPACE, **changes.pop("space", {})})
    return task_for({**given, "dataset": dataset, **changes}).prepare(space, made, "f"), made


def rows_of(folder: PreparedFolder, part: str = "train") -> list[list[int]]:
    """Of each pair the chosen row, then the rejected one, without what fills them up."""
    examples = PairExamples(folder.root / part)
    rows = []
    for pair in range(len(examples)):
        batch = examples.batch(np.array([pair]))
        lengths = batch["attention_mask"].sum(dim=1).tolist()
        rows += [
            row[:length] for row, length in zip(batch["input_ids"].tolist(), lengths, strict=True)
        ]
    return rows


def small_tokenizer(folder: Path, template: str | None = None, eos: str | None = "</s>") -> str:
    """One that is loaded from its folder: a token a character, and the template's signs."""
    signs = ["<s>", "</s>", "<u>", "<a>", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(
        models.WordLevel({sign: index for index, sign in enumerate(signs)}, unk_token="<s>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {} if eos is None else {"eos_token": eos}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.add_special_tokens({"additional_special_tokens": ["<u>", "<a>"]})
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


TEMPLATE = """{% for message in messages %}{% if message.role not in ('user', 'assistant') %}
{{- raise_exception('no role ' + message.role) }}{% endif %}
{{- '<' + message.role[0] + '>' + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<a>' }}{% endif %}"""


# -------------------------------------------------------------------------------------------------------------
# the data


def test_a_row_is_the_prompt_an_answer_and_the_end_of_text(tmp_path):
    prepared, folder = prepared_from(tmp_path, [PAIR, PAIR], tokenizer={"train_bpe": 300})
    tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer)
    end = tokenizer.eos_token_id
    expected = [
        [*tokenizer(PAIR["prompt"] + PAIR[answer])["input_ids"], end]
        for answer in ("chosen", "rejected")
    ]
    assert rows_of(folder) == 2 * expected
    assert prepared.train_examples == prepared.eval_examples == 2 and prepared.notes == ()
    assert prepared.train_tokens == 2 * sum(map(len, expected))
    config = AutoConfig.from_pretrained(folder.model_config)
    assert config.num_labels == 1 and config.vocab_size == len(tokenizer) == prepared.vocab_size
    assert (
        config.pad_token_id
        == tokenizer.pad_token_id
        not in {token for row in expected for token in row}
    )


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_a_tokenizer_of_characters_or_bytes_gets_a_padding_token(kind, tmp_path):
    _, folder = prepared_from(tmp_path, [PAIR, PAIR], tokenizer={"kind": kind})
    tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer)
    assert [tokenizer.decode(row) for row in rows_of(folder)[:2]] == [
        "How much? a lot",
        "How much? none",
    ]
    assert tokenizer.pad_token_id == len(tokenizer) - 1


def test_whole_texts_and_other_columns(tmp_path):
    rows = [{"a": "good text", "b": "bad text", "prompt": 3}] * 2
    dataset = {"prompt_column": None, "chosen_column": "a", "rejected_column": "b"}
    _, folder = prepared_from(tmp_path, rows, dataset=dataset)
    assert [bytes(row).decode() for row in rows_of(folder)[:2]] == ["good text", "bad text"]


def test_a_long_prompt_loses_its_beginning_and_a_pair_with_a_long_answer_is_left_out(tmp_path):
    rows = [
        {
            "prompt": "0123456789",
            "chosen": "abcdef",
            "rejected": "xy",
        },  # 16 bytes and 12: both lose 8
        {
            "prompt": "01",
            "chosen": "abcdef",
            "rejected": "xyxyxyxy",
        },  # as long as can be: 10, both lose 2
        {"prompt": "01", "chosen": "abcdefghi", "rejected": "xy"},  # an answer of 9 bytes
        {"prompt": "", "chosen": "a", "rejected": "b"},
    ]
    prepared, folder = prepared_from(tmp_path, rows, sequence_length=8)
    texts = [bytes(row).decode() for row in rows_of(folder)]
    assert texts == ["89abcdef", "89xy", "abcdef", "xyxyxyxy", "a", "b"]
    assert (prepared.train_examples, prepared.eval_examples) == (3, 3)
    for part in ("training", "evaluation"):
        (left_out,) = (note for note in prepared.notes if part in note and "left out" in note)
        (cut,) = (note for note in prepared.notes if part in note and "beginning" in note)
        assert left_out.startswith("1 of 4 ") and cut.startswith("2 of 4 ")


def test_a_token_of_the_prompts_end_and_the_answers_beginning_is_the_answers(tmp_path):
    """'a' and 'b' make one token; the answer's part of it is never cut."""
    merged = small_tokenizer(tmp_path / "model")
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3, "</s>": 4}, [("a", "b")]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(merged)
    rows = [{"prompt": "cca", "chosen": "bc", "rejected": "c"}] * 2
    prepared, folder = prepared_from(
        tmp_path, rows, tokenizer={"name_or_path": merged}, sequence_length=3
    )
    assert rows_of(folder)[:2] == [[3, 2, 4], [0, 2, 4]]
    with pytest.raises(BadInput, match="each of the 2 training pairs"):
        prepared_from(tmp_path, rows, tokenizer={"name_or_path": merged}, sequence_length=2)
    assert prepared.train_examples == 2


def test_messages_go_through_the_chat_template(tmp_path):
    tokenizer = small_tokenizer(tmp_path / "model", TEMPLATE)
    ask = [{"role": "user", "content": "hi"}]
    rows = [
        {
            "prompt": ask,
            **{name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")},
        }
    ] * 2
    _, folder = prepared_from(tmp_path, rows, tokenizer={"name_or_path": tokenizer})
    loaded = AutoTokenizer.from_pretrained(folder.tokenizer)
    spelt = ["".join(loaded.convert_ids_to_tokens(row)) for row in rows_of(folder)[:2]]
    assert spelt == ["<u>hi<a>chosen", "<u>hi<a>rejected"]

    whole = [
        {
            "chosen": rows[0]["prompt"] + rows[0]["chosen"],
            "rejected": rows[0]["prompt"] + rows[0]["rejected"],
        }
    ] * 2
    given = {"dataset": {"prompt_column": None}, "tokenizer": {"name_or_path": tokenizer}}
    _, folder = prepared_from(tmp_path, whole, **given)
    assert ["".join(loaded.convert_ids_to_tokens(row)) for row in rows_of(folder)[:2]] == spelt


def test_a_pretrained_tokenizer_without_padding_fills_up_with_its_end_of_text(tmp_path):
    """And puts none behind a text: transformers would take it for padding."""
    model = tmp_path / "model"
    name = small_tokenizer(model)
    size = len(AutoTokenizer.from_pretrained(name))
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2, vocab_size=size)).save_pretrained(
        model
    )
    given = {"model": {"name_or_path": str(model)}, "tokenizer": None}
    _, folder = prepared_from(tmp_path, [PAIR, PAIR], **given)
    tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer)
    config = AutoConfig.from_pretrained(folder.model_config)
    assert config.pad_token_id == tokenizer.pad_token_id == tokenizer.eos_token_id
    assert all(tokenizer.eos_token_id not in row for row in rows_of(folder))

    small_tokenizer(model, eos=None)
    _, folder = prepared_from(tmp_path, [PAIR, PAIR], **given)
    config = AutoConfig.from_pretrained(folder.model_config)
    assert all(config.pad_token_id not in row for row in rows_of(folder))
    assert 0 <= config.pad_token_id < size


def test_a_models_own_padding_fills_up_if_its_tokenizer_has_none(tmp_path):
    """RoBERTa's kind counts positions from it."""
    model = tmp_path / "model"
    size = len(AutoTokenizer.from_pretrained(small_tokenizer(model)))
    own = AutoConfig.for_model(**GPT2, vocab_size=size + 4, pad_token_id=size + 1)
    AutoModelForCausalLM.from_config(own).save_pretrained(model)
    given = {"model": {"name_or_path": str(model)}, "tokenizer": None}
    _, folder = prepared_from(tmp_path, [PAIR, PAIR], **given)
    assert AutoConfig.from_pretrained(folder.model_config).pad_token_id == size + 1


def test_rows_of_parquet_and_of_a_hub_say_their_number(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"chosen": ["a", "b"]}), tmp_path / "pairs.parquet")
    assert [row.where for row in file_rows(tmp_path / "pairs.parquet", ["chosen"])] == [
        f"{tmp_path / 'pairs.parquet'}, row {number}" for number in (1, 2)
    ]


CHAT = {
    "prompt": [{"role": "user", "content": "hi"}],
    "chosen": [{"role": "assistant", "content": "a"}],
}


@pytest.mark.parametrize(
    ("row", "changes", "said"),
    [
        (
            {**PAIR, "rejected": PAIR["chosen"]},
            {},
            "line 2: the chosen and the rejected answer must differ",
        ),
        ({**PAIR, "chosen": " "}, {}, "'chosen' must hold an answer, but "),
        ({**PAIR, "chosen": 1, "rejected": 2}, {}, "'chosen' must hold text, but "),
        ({**PAIR, "rejected": None}, {}, "'rejected' must hold an answer, but "),
        ({**PAIR, "prompt": 3}, {}, "'prompt' must hold text, but "),
        ({**PAIR, "chosen": CHAT["chosen"]}, {}, "'chosen' must hold text, but "),
        ({"chosen": "a", "rejected": "b"}, {}, "line 2, has no column 'prompt'"),
        (PAIR, {"dataset": {"rejected_column": "worse"}}, "has no column 'worse'"),
        ({**CHAT, "rejected": []}, {}, "'rejected' must hold an answer, but "),
        (
            {**CHAT, "rejected": [{"from": "narrator", "value": "b"}]},
            {},
            "'rejected' must hold text, or messages such as",
        ),
        (
            {**CHAT, "prompt": "hi", "rejected": CHAT["chosen"]},
            {},
            "hold whole chats, set prompt_column: null",
        ),
        (
            PAIR,
            {"sequence_length": 3},
            "each of the 2 training pairs has one that is longer than 3 tokens",
        ),
        (
            PAIR,
            {"sequence_length": 41},
            "workload.sequence_length must be at most the model's number of positions",
        ),
        (PAIR, {"space": {"output_layer": "fused"}}, "output_layer must be standard"),
        (
            PAIR,
            {"model": {"from_config": {**GPT2, "pad_token_id": 0}}},
            "from_config can't have pad_token_id",
        ),
        (
            PAIR,
            {"model": {"from_config": {**GPT2, "num_labels": 2}}},
            "from_config can't have num_labels",
        ),
        (
            PAIR,
            {"model": {"from_config": {"model_type": "vit"}}},
            "must be a sequence classification model",
        ),
    ],
)
def test_data_that_can_not_be_used_is_refused(row, changes, said, tmp_path):
    first = (
        PAIR
        if isinstance(row["chosen"], str)
        else {**CHAT, "rejected": [{"role": "assistant", "content": "b"}]}
    )
    with pytest.raises(BadInput) as refused:
        prepared_from(tmp_path, [first, row], **changes)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("template", "role", "said"),
    [
        (None, "user", "need a tokenizer with a chat template"),
        (TEMPLATE, "system", "no role system"),
    ],
)
def test_messages_that_the_tokenizer_does_not_take_are_refused(template, role, said, tmp_path):
    tokenizer = small_tokenizer(tmp_path / "model", template)
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    rows = [{"prompt": [{"role": role, "content": "hi"}], **answers}] * 2
    with pytest.raises(BadInput, match="line 1: ") as refused:
        prepared_from(tmp_path, rows, tokenizer={"name_or_path": tokenizer})
    assert said in str(refused.value)


def test_a_head_of_several_classes_is_refused(tmp_path):
    model = tmp_path / "model"
    size = len(AutoTokenizer.from_pretrained(small_tokenizer(model)))
    config = AutoConfig.for_model(**GPT2, vocab_size=size, num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(model)
    with pytest.raises(BadInput, match=r"must have 1 output, .* has 3"):
        prepared_from(tmp_path, [PAIR, PAIR], model={"name_or_path": str(model)}, tokenizer=None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"dataset": {"builtin": "python-docs", "prompt": "p"}},
            "unknown key workload.dataset.prompt; did you mean",
        ),
        (
            {"dataset": {"builtin": "python-docs", "chosen_column": "rejected"}},
            "rejected_column must differ, but are",
        ),
        ({"sequence_length": None}, "workload.sequence_length"),
        ({"tokenizer": None}, "a model from_config has no tokenizer"),
    ],
)
def test_settings_that_can_not_be_are_refused(changes, said):
    raw = study().config.model_dump(mode="json", exclude_none=True)
    given = {
        "task": "reward",
        "model": {"from_config": GPT2},
        "tokenizer": {"kind": "char"},
        "dataset": {"builtin": "python-docs"},
        "sequence_length": LENGTH,
    }
    with pytest.raises(BadInput) as refused:
        parse_study(
            {**raw, "target": {"preference_accuracy": 0.5}, "workload": {**given, **changes}},
            "study.yaml",
        )
    assert said in str(refused.value)
    with pytest.raises(BadInput, match="target must be preference_accuracy"):
        parse_study({**raw, "workload": given}, "study.yaml")


def test_the_built_in_pairs_differ_and_end_with_those_for_evaluation(tmp_path):
    model = {"from_config": {**GPT2, "n_positions": 4096}}
    given = workload(
        tmp_path, model=model, dataset={"builtin": "python-docs"}, sequence_length=4096
    )
    (root := tmp_path / "prepared").mkdir()
    prepared = task_for(given).prepare(Space.model_validate(SPACE), PreparedFolder(root), "f")
    assert prepared.notes == () and prepared.train_examples > 1000
    assert prepared.eval_examples == round((prepared.train_examples + prepared.eval_examples) / 10)


# --------------------------------------------------------------------------------------------------------------
# scores


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_score_is_that_of_the_last_token_whatever_stands_behind_it(config, tmp_path):
    """Also at a length that is no multiple of what rows are filled up to, which the model has no
    positions beyond.
    """
    rows = [PAIR, {**PAIR, "chosen": "z" * 27, "rejected": "y"}]
    small = {**config, "n_positions" if config is GPT2 else "max_position_embeddings": 37}
    _, folder = prepared_from(tmp_path, rows, model={"from_config": small}, sequence_length=37)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.from_pretrained(folder.model_config)
    ).eval()
    batch = PairExamples(folder.root / "train").batch(np.array([0, 1, -1]))
    assert batch["input_ids"].shape == (6, 37) and batch["weights"].tolist() == [1, 1, 0]
    with torch.no_grad():
        scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[
            :, 0
        ]
        alone = [model(input_ids=torch.tensor([row])).logits.item() for row in rows_of(folder)]
    assert scores[[0, 3, 1, 4]].tolist() == pytest.approx(alone, abs=1e-6)


def test_a_tie_counts_as_wrong_a_filler_as_nothing_and_a_nan_as_no_number(tmp_path):
    class Scored(torch.nn.Module):
        def __init__(self, *scores: float) -> None:
            super().__init__()
            self.scores = torch.tensor(scores)[:, None]

        def forward(self, input_ids, attention_mask):
            return type("Output", (), {"logits": self.scores})

    task = task_for(workload(tmp_path))
    assert isinstance(task, Reward)
    batch = {
        "input_ids": torch.zeros(8, 1),
        "attention_mask": torch.ones(8, 1),
        "weights": torch.tensor([1, 1, 1, 0]),
    }
    sums = task.sums(Scored(2.0, 1.0, 0.0, 9.0, 0.5, 1.0, 3.0, 0.0), batch)
    evaluation = task.evaluation(sums.tolist())
    assert (evaluation.sum, evaluation.count) == (1.0, 3)
    assert evaluation.others == {"mean_margin": pytest.approx((1.5 + 0 - 3) / 3)}
    loss = task.loss_sum(Scored(2.0, 1.0, 0.0, 9.0, 0.5, 1.0, 3.0, 0.0), batch)
    assert loss.item() == pytest.approx(
        sum(math.log1p(math.exp(-margin)) for margin in (1.5, 0.0, -3.0))
    )
    assert math.isnan(task.evaluation(task.sums(Scored(*[math.nan] * 8), batch).tolist()).sum)


# --------------------------------------------------------------------------------------------------------------
# trials


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> PreparedFolder:
    folder = tmp_path_factory.mktemp("study")
    space = Space.model_validate(SPACE)
    given = workload(folder)
    prepare(
        PrepareSpec(
            workload=given, space=space, prepared_dir=str(folder / "prepared"), fingerprint="f"
        )
    )
    return PreparedFolder(folder / "prepared")


@pytest.fixture(scope="module")
def trial(prepared, tmp_path_factory):
    def run(seed=0, save=False, at=prepared, **params) -> Run:
        folder = tmp_path_factory.mktemp("trial")
        params = {**PARAMS, **params}
        given = json.loads(at.workload.read_text())
        spec = {
            "number": 0, "attempt": 1, "seed": seed, "params": params, "workload": given,
            "prepared_dir": str(at.root), "trial_dir": str(folder),
            "saves_model": save,
        }  # fmt: skip
        made = start("rank_main", spec, folder, params.get("world_size", 1))
        assert made.exit_code == FINISHED_EXIT, made.events[-1]
        return made

    return run


@pytest.fixture(scope="module")
def reference(trial) -> Run:
    """ZeRO 1, one rank, no accumulation."""
    return trial()


def found(run: Run) -> list[tuple[float, float]]:
    return [(point.value, point.other_qualities["mean_margin"]) for point in run.points]


def close(run: Run) -> Any:
    """Accuracies to 1e-3, which is to the pair, and the margins that say far more of the weights."""
    return [pytest.approx(values, rel=1e-3, abs=1e-4) for values in found(run)]


@pytest.mark.slow
def test_it_learns(reference):
    first, last = reference.points
    assert last.count == EVAL_PAIRS and last.sum == round(last.value * EVAL_PAIRS) >= 16
    assert last.other_qualities["mean_margin"] > first.other_qualities["mean_margin"] > 0
    assert last.tokens is None


@pytest.mark.slow
def test_the_same_seed_gives_the_same_and_another_seed_another(reference, trial):
    assert trial().points == reference.points
    assert found(trial(seed=1))[0] != found(reference)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"zero_stage": 0, "micro_batch_size_per_gpu": 2},
        {"zero_stage": 1, "micro_batch_size_per_gpu": 4, "world_size": 2},
        {"zero_stage": 2, "micro_batch_size_per_gpu": 2, "world_size": 2, "offload": "optimizer"},
        {"zero_stage": 3, "micro_batch_size_per_gpu": 4, "gradient_checkpointing": True},
    ],
    ids=lambda params: "-".join(map(str, params.values())),
)
def test_how_a_step_is_computed_does_not_change_it(params, reference, trial):
    assert found(trial(**params)) == close(reference)


@pytest.mark.slow
def test_plain_transformers_finds_the_same_on_the_saved_model(prepared, reference, trial):
    """ZeRO 3 on two ranks, an odd number of pairs; each text by itself, from the file, through the
    saved tokenizer.
    """
    run = trial(zero_stage=3, world_size=2, micro_batch_size_per_gpu=2, save=True)
    assert found(run) == close(reference)
    model = AutoModelForSequenceClassification.from_pretrained(run.folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")

    def score(text: str) -> float:
        with torch.no_grad():
            return float(model(**tokenizer(text, return_tensors="pt")).logits)

    rows = [
        json.loads(line) for line in (prepared.root.parent / "eval.jsonl").read_text().splitlines()
    ]
    margins = [
        score(row["prompt"] + row["chosen"]) - score(row["prompt"] + row["rejected"])
        for row in rows
    ]
    accuracy = sum(margin > 0 for margin in margins) / len(margins)
    assert found(run)[-1] == pytest.approx((accuracy, sum(margins) / len(margins)), rel=1e-3)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> PreparedFolder:
    """From a language model, which has no head."""
    folder = tmp_path_factory.mktemp("pretrained")
    base = folder / "base"
    size = len(AutoTokenizer.from_pretrained(small_tokenizer(base)))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**LLAMA, vocab_size=size)
    ).save_pretrained(base)
    given = workload(folder, model={"name_or_path": str(base)}, tokenizer=None, evaluations=1)
    space = Space.model_validate(SPACE)
    prepare(
        PrepareSpec(
            workload=given, space=space, prepared_dir=str(folder / "prepared"), fingerprint="f"
        )
    )
    return PreparedFolder(folder / "prepared")


@pytest.mark.slow
def test_a_new_head_is_drawn_from_the_seed_whatever_the_zero_stage(pretrained, trial):
    """At a learning rate of nothing the weights stay as they began."""
    begun = {"at": pretrained, "learning_rate": 1e-12, "epochs": 0.05}
    reference = trial(**begun)
    for zero in (
        {"zero_stage": 0},
        {"zero_stage": 3},
        {"zero_stage": 3, "world_size": 2, "micro_batch_size_per_gpu": 4},
    ):
        assert found(trial(**begun, **zero)) == close(reference)
    assert abs(found(trial(**begun, seed=1))[0][1] / found(reference)[0][1] - 1) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_adapters_learn_with_the_head(zero_stage, pretrained, trial):
    untrained = trial(at=pretrained, zero_stage=zero_stage, learning_rate=1e-12, lora_rank=4)
    trained = trial(at=pretrained, zero_stage=zero_stage, learning_rate=2e-2, lora_rank=4, epochs=3)
    assert (
        trained.points[-1].other_qualities["mean_margin"]
        > untrained.points[-1].other_qualities["mean_margin"] + 0.5
    )


# ------------------------------------------------------------------------------------------------------------
# the study


@pytest.mark.slow
def test_the_shipped_study_runs_to_its_end_and_its_winner_is_found_again(tmp_path):
    done = within(
        "run", ROOT / "studies" / "reward.yaml", "--out", tmp_path / "out", "--trials", "1"
    )
    assert done.returncode == 0, done.stderr
    exported = within("export", tmp_path / "out").stdout.splitlines()
    records = {record["trial"]: record for record in map(json.loads, exported)}
    recommended = json.loads(within("recommend", tmp_path / "out", "--json").stdout)
    assert len(records) == 1 and recommended["met"]
    quality = records[recommended["trial"]]["quality"]
    assert quality["name"] == "preference_accuracy" and quality["value"] >= 0.9
    assert quality["sum"] == round(quality["value"] * quality["count"])

    winner = tmp_path / "out" / "report" / "winner"
    again = subprocess.run(
        ["sh", "run.sh"], cwd=winner, capture_output=True, text=True, timeout=200
    )
    assert again.returncode == 0, again.stderr
    result = json.loads((winner / "output" / "result.json").read_text())
    assert result["quality"]["value"] == pytest.approx(quality["value"], abs=1e-3)
    assert result["quality"]["count"] == quality["count"]
    assert (
        AutoModelForSequenceClassification.from_pretrained(winner / "output").config.num_labels == 1
    )
    assert "pipeline_tag: text-classification" in (winner / "model_card.md").read_text()

"""Prompts, responses and chats as tokens: which of them are a response's, against what was written
by hand.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from carbonopt.core.errors import BadInput
from carbonopt.spec.workload_settings import Dataset
from carbonopt.train.data.chat import Chat, chat_messages, marked, prompt_and_response
from carbonopt.train.data.pair_rows import tokenized
from carbonopt.train.data.pairs import Pair, pair_of
from carbonopt.train.data.prompts import RawPrompts
from carbonopt.train.data.responses import keep
from carbonopt.train.data.rows import Row, file_rows, read_rows
from carbonopt.train.data.tokens import TextEncoder
from carbonopt.train.rewards import load_rewards
from carbonopt.train.tasks.rlhf import RewardSource

CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
GENERATION = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' -%}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else -%}{{ message.content + '<|im_end|>' }}{%- endif -%}{{ '\n' }}
{%- endfor -%}"""
WITHOUT_SPECIAL_TOKENS = """{%- for message in messages -%}{{ message.role + ': ' + message.content + '\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""
FORGETS = """{%- for message in messages -%}{%- if message.role == 'user' or loop.last -%}
{{ message.role + ': ' + message.content + '\n' }}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""
ONLY_TURNS = (
    CHATML
    + "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system') }}{%- endif -%}"
)


def tokenizer(template: str | None = None, begins: bool = False) -> PreTrainedTokenizerFast:
    """Of bytes, with the words of CHATML, and with a token before each text if it `begins`."""
    bytes_only = {character: byte for byte, character in bytes_to_unicode().items()}
    fast = Tokenizer(models.BPE(bytes_only, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
    fast.add_special_tokens([AddedToken(text, special=True) for text in special])
    if begins:
        fast.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", fast.token_to_id("<s>"))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def test_usual_roles_are_read_in_any_case() -> None:
    said = [("User", "a"), ("ASSISTANT ", "b"), ("Narrator", "c")]
    messages = [{"role": role, "content": text} for role, text in said]
    read = chat_messages(Row({"chat": messages}, "row 1"), "chat")
    assert [message["role"] for message in read.messages] == ["user", "assistant", "Narrator"]
    assert read.answers
    pair = Row({"chosen": messages[:2], "rejected": messages[:1]}, "row 1")
    assert pair_of(pair, None, "chosen", "rejected").chosen[1]["role"] == "assistant"


@pytest.mark.parametrize("roles", [("human", "gpt"), ("user", "model"), ("system", "Bot", "user")])
def test_an_assistant_with_another_role_is_refused_by_name(roles: tuple[str, ...]) -> None:
    usual = chat(("user", "a"), ("assistant", "b"))
    other = Chat([{"role": role, "content": "a"} for role in roles], "row 2")
    with pytest.raises(BadInput, match=f"row 2 are .*{roles[1]}"):
        keep([usual, other], tokenizer(CHATML), False, 50, "training")


def test_chats_without_a_response_are_left_out() -> None:
    usual = chat(("human", "a"), ("assistant", "b"))
    unanswered = [chat(("user", "a")), chat(("human", "a")), chat(("system", "a"), ("user", "b"))]
    kept = keep([usual, *unanswered], tokenizer(CHATML), False, 50, "training")
    assert len(kept.examples) == 1 and "3 had no response" in kept.note


def chat(*said: tuple[str, str]) -> Chat:
    return Chat([{"role": role, "content": content} for role, content in said], "row 1")


def responses(
    one_chat: Chat, by: PreTrainedTokenizerFast, plain: bool = False
) -> tuple[str, list[str]]:
    """All of its text, and each run of tokens that are marked."""
    (example,) = marked([one_chat], by, plain)
    edges = np.flatnonzero(np.diff(example.in_response.astype(int), prepend=0, append=0)).reshape(
        -1, 2
    )
    runs = [by.decode(example.tokens[first:last]) for first, last in edges]
    return by.decode(example.tokens), runs


TWO_TURNS = chat(
    ("system", "Be kind."),
    ("user", "Hi"),
    ("assistant", "Hello ü"),
    ("user", "Bye"),
    ("assistant", "Ciao"),
)


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_what_the_assistant_says_and_its_end_are_the_response(template):
    whole, runs = responses(TWO_TURNS, tokenizer(template))
    assert runs == ["Hello ü<|im_end|>", "Ciao<|im_end|>"]
    turns = [
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
        for message in TWO_TURNS.messages
    ]
    assert whole == "".join(turns)


def test_where_no_token_ends_a_turn_its_line_does():
    assert responses(TWO_TURNS, tokenizer(WITHOUT_SPECIAL_TOKENS))[1] == ["Hello ü\n", "Ciao\n"]


def test_what_answers_nothing_is_no_response():
    greeted = chat(
        ("assistant", "Welcome"),
        ("user", "Hi"),
        ("assistant", " "),
        ("user", "Well?"),
        ("assistant", "Yes"),
    )
    assert responses(greeted, tokenizer(CHATML))[1] == ["Yes<|im_end|>"]
    assert greeted.answers and not chat(("assistant", "Welcome"), ("user", "Hi")).answers
    assert not chat(("user", "Hi"), ("assistant", "")).answers and not Chat([], "row 1").answers


@pytest.mark.parametrize(("begins", "first"), [(False, ""), (True, "<s>")])
def test_without_a_template_prompt_and_response_are_joined(begins, first):
    row = Row({"q": "Name it: ", "a": "this\n", "n": None}, "row 1")
    pair = prompt_and_response(row, "q", "a")
    assert responses(pair, tokenizer(begins=begins), plain=True) == (
        f"{first}Name it: this\n</s>",
        ["this\n</s>"],
    )
    assert not prompt_and_response(row, "q", "n").answers
    assert responses(prompt_and_response(row, "n", "a"), tokenizer(), plain=True) == (
        "this\n</s>",
        ["this\n</s>"],
    )


def test_a_prompt_and_its_response_by_the_model_s_own_template():
    pair = prompt_and_response(
        Row({"prompt": "Hi", "response": "Ho"}, "row 1"), "prompt", "response"
    )
    whole, runs = responses(pair, tokenizer(CHATML))
    assert whole == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert runs == ["Ho<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            FORGETS,
            (
                "must write a chat's beginning as it writes the whole chat, but writes message 3 of"
                " row 1"
            ),
        ),
        (ONLY_TURNS, "chat template refuses row 1: no system."),
        (CHATML + "{# {% generation %} #}", "marks no token of row 1 as the assistant's"),
    ],
)
def test_a_template_that_does_not_say_what_is_the_assistant_s_is_refused(template, said):
    with pytest.raises(BadInput) as refused:
        responses(TWO_TURNS, tokenizer(template))
    assert said in str(refused.value)


def test_a_cut_example_keeps_the_beginning_of_its_response_and_one_more_token_to_predict():
    long = chat(("user", "12345"), ("assistant", "abcdefgh"))
    by = tokenizer()
    kept = keep([long, chat(("user", "1" * 9), ("assistant", "a"))], by, True, 8, "training")
    (example,) = kept.examples
    assert (
        by.decode(example.tokens) == "12345abcd" and kept.response_tokens == 4 and kept.tokens == 8
    )
    assert (
        kept.note
        == "Of 2 training rows 1 are used: the prompt of 1 left no room for a response, 1 were cut"
        " to their first 8 tokens."
    )


def test_without_a_prompt_all_but_the_first_token_is_learned_and_the_reason_is_said():
    chats = [chat(("user", ""), ("assistant", text)) for text in ("x", "xy", "xyz" * 4)]
    for begins, learned in ((False, [1, 8]), (True, [1, 2, 8])):
        by = tokenizer(begins=begins)
        by.eos_token = None
        kept = keep(chats, by, True, 8, "training")
        assert [int(example.in_response[1:].sum()) for example in kept.examples] == learned
        assert "left no room" not in kept.note
        assert ("1 had a response of one token and no prompt" in kept.note) is not begins


def test_lists_of_messages_come_through_the_readers(tmp_path: Path):
    rows = [
        {"messages": TWO_TURNS.messages},
        {"messages": [{"role": "user", "content": "Hi", "name": "Ann"}]},
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "chats.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    for name in ("chats.jsonl", "chats.json", "chats.parquet"):
        read = [chat_messages(row, "messages") for row in file_rows(tmp_path / name, ("messages",))]
        assert [each.messages for each in read] == [row["messages"] for row in rows]

    hub = tmp_path / "hub"
    hub.mkdir()
    for split in ("train", "validation"):
        shutil.copy(tmp_path / "chats.jsonl", hub / f"{split}.jsonl")
    for part in read_rows(Dataset(name_or_path=str(hub)), ("messages",)):
        assert [chat_messages(row, "messages").messages for row in part] == [
            row["messages"] for row in rows
        ]


@pytest.mark.parametrize(
    "value",
    [
        "text",
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        ["text"],
        [{"role": "user", "content": ["a"]}],
        {"a": 1},
    ],
)
def test_what_is_no_list_of_messages_is_refused(value):
    with pytest.raises(BadInput, match=r"column 'm' must hold lists of messages, .* but row 1 has"):
        chat_messages(Row({"m": value}, "row 1"), "m")


CALL = {"type": "function", "function": {"name": "w", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("given", "role", "content"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "assistant", ""),
        ({"role": "assistant", "tool_calls": [CALL]}, "assistant", ""),
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, "user", "a"),
        ({"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}, "user", "ab"),
        ({"from": "human", "value": "a"}, "user", "a"),
        ({"from": "gpt", "value": "a", "role": None}, "assistant", "a"),
        ({"from": "system", "value": "a", "weight": None}, "system", "a"),
    ],
)
def test_common_forms_of_messages_are_read(given, role, content):
    (message,) = chat_messages(Row({"m": [given]}, "row 1"), "m").messages
    assert (message["role"], message["content"]) == (role, content)
    assert not {"from", "value"} & set(message)
    pair = pair_of(Row({"c": [given, {"from": "gpt", "value": "b"}], "r": [
        {"role": "assistant", "content": "c"}]}, "row 1"), None, "c", "r")  # fmt: skip
    assert pair.chosen[0] == message


def test_parquet_gives_a_call_no_arguments_of_other_tools(tmp_path):
    """JSON lines keep a null that was written."""

    def calls(**arguments: object) -> list[dict]:
        call = {"type": "function", "function": {"name": "w", "arguments": arguments}}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]

    rows = [{"m": calls(city="Rome")}, {"m": calls(expr="1 + 1")}]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    lines = [*rows, {"m": calls(city=None)}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def given(name: str) -> list[dict]:
        chats = [chat_messages(row, "m").messages for row in file_rows(tmp_path / name, ("m",))]
        return [chat[0]["tool_calls"][0]["function"]["arguments"] for chat in chats]

    assert given("rows.parquet") == [{"city": "Rome"}, {"expr": "1 + 1"}]
    assert given("rows.jsonl") == [{"city": "Rome"}, {"expr": "1 + 1"}, {"city": None}]


@pytest.mark.parametrize(
    "given",
    [
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
        {"from": "function_call", "value": "a"},
        {"from": "gpt"},
    ],
)
def test_messages_that_are_not_text_alone_are_refused(given):
    with pytest.raises(BadInput, match=r"'m' must hold lists of messages, .* but row 1 has"):
        chat_messages(Row({"m": [given]}, "row 1"), "m")


def weighted(weight: object) -> list[dict]:
    answers = [{"role": "assistant", "content": "Hello", "weight": weight}]
    later = [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Ciao"}]
    return [{"role": "user", "content": "Hi"}, *answers, *later]


@pytest.mark.parametrize(
    ("weight", "learned"), [(0, ["Ciao"]), (1, ["Hello", "Ciao"]), (None, ["Hello", "Ciao"])]
)
def test_answers_with_a_weight_of_0_are_not_learned(weight, learned):
    read = chat_messages(Row({"m": weighted(weight)}, "row 1"), "m")
    assert responses(read, tokenizer(CHATML))[1] == [f"{text}<|im_end|>" for text in learned]
    if weight == 0:
        with pytest.raises(BadInput, match="row 1 has an answer that is not to be learned"):
            responses(read, tokenizer(GENERATION))
    else:
        assert len(responses(read, tokenizer(GENERATION))[1]) == 2


@pytest.mark.parametrize("weight", [0.5, 2, "0"])
def test_other_weights_are_refused(weight):
    with pytest.raises(BadInput, match=r"weight must be 0, .* but row 1 has"):
        chat_messages(Row({"m": weighted(weight)}, "row 1"), "m")


def test_a_prompt_of_messages_has_a_completion_of_messages_that_alone_is_learned():
    *prompt, answer = weighted(None)
    read = prompt_and_response(Row({"p": prompt, "c": [answer]}, "row 1"), "p", "c")
    assert not read.are_texts
    whole, runs = responses(read, tokenizer(CHATML))
    assert runs == ["Ciao<|im_end|>"] and "Hello" in whole
    for values in ({"p": "Hi", "c": [answer]}, {"p": prompt, "c": "Ciao"}):
        with pytest.raises(BadInput, match="'p' and 'c' must both hold text, or both"):
            prompt_and_response(Row(values, "row 1"), "p", "c")


@pytest.mark.parametrize("written", ["", "{{ bos_token }}"])
def test_a_chat_to_be_answered_begins_once(written) -> None:
    """TRL and reward models let the tokenizer put its beginning before each prompt's text."""
    reads = tokenizer(written + CHATML, begins=True)
    asked = RawPrompts("training", [([{"role": "user", "content": "hi"}], "row 1"), ("<s>", "2")])
    chat_text, plain_text = asked.kept(reads, 64).texts
    assert reads(chat_text)["input_ids"].count(reads.bos_token_id) == 1
    assert chat_text.startswith("<|im_start|>user") and plain_text == "<s>"


@pytest.mark.parametrize("written", ["", "{{ bos_token }}"])
def test_a_reward_model_reads_an_answered_chat_as_it_was_trained_to(written, tmp_path) -> None:
    reads = tokenizer(written + CHATML, begins=True)
    reads.pad_token = "</s>"
    config = LlamaConfig(
        vocab_size=len(reads), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_labels=1, pad_token_id=reads.pad_token_id, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).eval()
    for part in (reads, model):
        part.save_pretrained(tmp_path)
    asked = [{"role": "user", "content": "hi"}]
    answers = [[{"role": "assistant", "content": said}] for said in ("good", "no")]
    encoder = TextEncoder(
        reads, lambda texts: map(np.array, reads(texts, add_special_tokens=False)["input_ids"])
    )
    rows = tokenized([Pair(asked, *answers, "row 1")], encoder, 200, "training").rows
    with torch.no_grad():
        trained = [model(torch.tensor(row.tolist())[None]).logits.item() for row in rows]
    (prompt,) = RawPrompts("training", [(asked, "row 1")]).kept(reads, 64).texts
    scores = load_rewards(RewardSource(model=str(tmp_path)), "reward")
    assert scores([prompt, prompt], ["good", "no"]) == pytest.approx(trained, abs=1e-5)

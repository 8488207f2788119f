"""Chat templates that would write another text on another day."""

import random
from datetime import datetime

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import chat_template_utils

from carbonopt.train.data import templates
from carbonopt.train.data.chat import Chat, marked
from carbonopt.train.data.pairs import Pair, spelt

MESSAGES = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
MARKED = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
TEMPLATES = {
    "today": "{{ strftime_now('%A %d %B %Y %H:%M:%S.%f') }}" + MESSAGES + PROMPT,
    "a default": (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y %f') %}{%"
        " endif %}{{ date_string }}" + MESSAGES + PROMPT
    ),
    "if it can": (
        "{% if strftime_now is defined %}{{ strftime_now('%s%f') }}{% endif %}" + MESSAGES + PROMPT
    ),
    "marked": "{{ strftime_now('%d %b %Y %f') }}" + MARKED,
    "at random": "{{ range(90000) | random }}" + MESSAGES + PROMPT,
}
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(
        models.BPE({character: byte for byte, character in bytes_to_unicode().items()}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.chat_template = template
    return made


def on_day(day: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2027, 5, day, 1, 2, 3, day)

    monkeypatch.setattr(chat_template_utils, "datetime", Later)
    random.seed(day)


@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_are_the_same_tokens_on_any_day(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, read = tokenizer_of(TEMPLATES[template]), []
    for day in (1, 2):
        on_day(day, monkeypatch)
        (example,) = marked([Chat(CHAT, "row 1")], tokenizer, plain=False)
        assert example.in_response.any()
        read.append(example.tokens.tolist())
    assert read[0] == read[1]


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "marked"])
def test_prompts_and_pairs_are_the_same_on_any_day(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, written = tokenizer_of(TEMPLATES[template]), []
    for day in (1, 2):
        on_day(day, monkeypatch)
        pair = Pair(CHAT[:1], CHAT[1:], [{"role": "assistant", "content": "No"}], "row 1")
        written.append([spelt(CHAT[:1], tokenizer, "row 1"), *pair.texts(tokenizer)])
    assert written[0] == written[1]


def test_python_s_own_generator_goes_on_as_if_nothing_had_been_drawn() -> None:
    tokenizer = tokenizer_of(TEMPLATES["at random"])
    random.seed(7)
    expected = random.random()
    random.seed(7)
    templates.apply(tokenizer, CHAT, tokenize=False)
    assert random.random() == expected


def test_the_date_is_said_where_there_is_one() -> None:
    assert f"{templates.TODAY:%Y-%m-%d}" in templates.note(tokenizer_of(TEMPLATES["today"]))
    assert templates.note(tokenizer_of(MESSAGES)) == ""

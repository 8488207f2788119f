"""`carbonopt init`: for each task a study file that `check` takes; what is wrong is refused, and
leaves no file.
"""

import io
import json
import os
import pty
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import refusal, within

from carbonopt.study_file import new_study
from carbonopt.study_file.init_answers import parse_budget, parse_values, proposed_data
from carbonopt.study_file.reader import load_study
from carbonopt.study_file.study_schema import study_schema
from carbonopt.train.tasks.task import TASKS

ROWS = 120


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def command_of(number: int) -> str:
    return f"please play song number {number} of the second album"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data for every task, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    numbers = range(ROWS)
    (tmp_path / "text.txt").write_text("\n".join(map(command_of, numbers)) * 20)
    write_rows(
        tmp_path / "chats.jsonl", ({"prompt": command_of(i), "response": "ok"} for i in numbers)
    )
    pairs = ({"prompt": command_of(i), "chosen": "yes", "rejected": "no"} for i in numbers)
    write_rows(tmp_path / "pairs.jsonl", pairs)
    labels = ({"Text": command_of(i), "intent": ["play", "stop", "pause"][i % 3]} for i in numbers)
    write_rows(tmp_path / "intents.jsonl", labels)
    queries = ({"question": command_of(i), "sql": f"SELECT {i}"} for i in numbers)
    write_rows(tmp_path / "queries.jsonl", queries)
    (tmp_path / "reward.py").write_text(
        "def brevity(prompts, completions):\n    return [-len(it) / 100 for it in completions]\n"
        "print\n"
    )
    (tmp_path / "train.py").write_text("import sys\nprint('accuracy', 0.5)\n")
    return tmp_path


COMMON = ("--gpus", "none", "--country", "DEU", "--budget", "20 8h")
ANSWERS: dict[str, tuple[str, ...]] = {
    "causal_lm": ("--data", "text.txt", "--target", "60"),
    "sft": ("--data", "chats.jsonl", "--target", "perplexity=60"),
    "reward": ("--data", "pairs.jsonl", "--target", "0.7"),
    "dpo": ("--data", "pairs.jsonl", "--target", "0.7"),
    "rlhf": ("--data", "chats.jsonl", "--target", "reward>=-0.2", "--reward", "reward.py:brevity"),
    "classification": ("--data", "intents.jsonl", "--target", "macro_f1=0.8"),
    "seq2seq": ("--data", "queries.jsonl", "--target", "exact_match=0.6"),
    "script": ("--target", "bleu>=30", "--values", "hidden=32,128", "--values", "learning_rate=1e-4..1e-2"),
}  # fmt: skip
COMMAND = "python train.py --lr {learning_rate} --hidden {hidden} --seed {seed}"


def options(task: str, model: str = "from_config") -> list[str]:
    which = ["--command", COMMAND] if task == "script" else ["--model", model]
    return ["--task", task, *which, *ANSWERS[task], *COMMON]


def made(*arguments: object, out: str = "study.yaml") -> dict[str, Any]:
    """The study that a successful `init` has written, as plain data."""
    done = within("init", *arguments, "--out", out)
    assert done.returncode == 0, done.stderr
    assert f"carbonopt check {out}" in done.stdout
    assert f"carbonopt run {out}" in done.stdout
    return yaml.safe_load(Path(out).read_text())


@pytest.mark.parametrize("task", TASKS)
def test_the_file_of_each_task_passes_check(task: str, here: Path) -> None:
    study = made(*options(task), out=f"{task}.yaml")
    assert study["name"] == study["workload"]["task"] == task
    assert study["budget"] == {"trials": 20, "hours": 8, "until": "converged"}
    assert study["launch"] == {"gpus": []}
    from jsonschema import Draft7Validator

    assert list(Draft7Validator(study_schema()).iter_errors(study)) == []
    done = within("check", f"{task}.yaml")
    assert done.returncode == 0, done.stderr
    assert load_study(here / f"{task}.yaml").carbon.country == "DEU"


@pytest.mark.parametrize(
    ("task", "builtin"),
    [
        *((task, "python-docs") for task in ("causal_lm", "sft", "reward", "dpo", "rlhf")),
        ("classification", "digits"),
    ],
)
def test_builtin_data_passes_check(task: str, builtin: str, here: Path) -> None:
    answers = options(task)
    answers[answers.index("--data") + 1] = builtin
    study = made(*answers)
    assert study["workload"]["dataset"] == {"builtin": builtin}
    assert within("check", "study.yaml").returncode == 0


def test_what_the_data_shows_is_in_the_file(here: Path) -> None:
    study = made(*options("classification"))
    workload = study["workload"]
    assert workload["dataset"] == {
        "train_files": ["intents.jsonl"],
        "text_column": "Text",
        "label_column": "intent",
    }
    # Nine of ten texts have at most 48 characters, 16 tokens; with room, the next power of two.
    assert workload["sequence_length"] == 32
    assert "120 rows, 3 classes" in Path("study.yaml").read_text()


def test_evaluation_files_and_folders_are_found(here: Path) -> None:
    rows = Path("intents.jsonl").read_text()
    for name in ("flat/train.jsonl", "flat/test.jsonl", "flat/dev.jsonl", "one/all.jsonl"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(rows)
    answers = options("classification")
    place = answers.index("--data") + 1
    found = {}
    for number, data in enumerate(("flat", "flat/train.jsonl", "one")):
        answers[place] = data
        dataset = made(*answers, out=f"{number}.yaml")["workload"]["dataset"]
        found[data] = dataset["train_files"], dataset.get("eval_files")
    assert found == {
        "flat": (["flat/train.jsonl"], ["flat/dev.jsonl"]),
        "flat/train.jsonl": (["flat/train.jsonl"], ["flat/dev.jsonl"]),
        "one": (["one/all.jsonl"], None),
    }


def test_a_folder_of_pictures_is_found(here: Path) -> None:
    from PIL import Image

    for split in ("train", "val"):
        for kind in ("cat", "dog"):
            (here / "pets" / split / kind).mkdir(parents=True)
            for number in range(5):
                Image.new("RGB", (8, 8), (number, 0, 0)).save(
                    here / "pets" / split / kind / f"{number}.png"
                )
    study = made(
        "--task",
        "classification",
        "--data",
        "pets",
        "--model",
        "from_config",
        "--target",
        "0.9",
        *COMMON,
    )
    assert study["workload"]["dataset"] == {
        "name_or_path": "./pets",
        "image_column": "image",
        "label_column": "label",
    }
    assert "sequence_length" not in study["workload"]
    assert "10 rows, 2 classes" in Path("study.yaml").read_text()
    assert within("check", "study.yaml").returncode == 0
    config = load_study(here / "study.yaml")
    assert config.workload.dataset.name_or_path == str(here / "pets")


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "json", "jsonl.gz"])
def test_every_kind_of_file_is_looked_at(kind: str, here: Path) -> None:
    import gzip

    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in Path("intents.jsonl").read_text().splitlines()]
    path = here / f"data.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(Path("intents.jsonl").read_bytes()))
    else:
        mark = "," if kind == "csv" else "\t"
        lines = [mark.join(rows[0]), *(mark.join(row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    answers = options("classification")
    answers[answers.index("--data") + 1] = path.name
    made(*answers)
    assert "120 rows, 3 classes" in Path("study.yaml").read_text()
    assert within("check", "study.yaml").returncode == 0


HOSTILE = {
    "text": "a: b # c {d} \"e\" \\ 'f' %",
    "label": "1e-3",
    "yes": "y",
    "é ü": "no",
}


def test_hostile_names_are_written_as_they_are(here: Path) -> None:
    folder = here / "my data: # {x}"
    folder.mkdir()
    data = folder / "~a, 'b' \"c\" é.jsonl"
    text, label = HOSTILE["text"], HOSTILE["label"]
    write_rows(data, ({text: command_of(i), label: i % 2} for i in range(ROWS)))
    out = folder / "no #1.yaml"
    done = within(
        "init", *options("classification")[:4], "--data", data, "--column", f"text_column={text}",
        "--column", f"label_column={label}", "--target", "0.9", *COMMON, "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config = load_study(out)
    assert config.name == "no #1"
    dataset = config.workload.dataset
    assert dataset.train_files == (str(data),)
    assert (dataset.text_column, dataset.label_column) == (text, label)
    assert within("check", out).returncode == 0


def test_a_script_gets_the_values_that_are_usual_for_its_dimensions(here: Path) -> None:
    space = made(*options("script"))["search"]["space"]
    assert space == {
        "learning_rate": {"low": 0.0001, "high": 0.01, "log": True},
        "hidden": {"choices": [32, 128]},
    }


CLASSES = {
    "reward": ("LlamaForSequenceClassification", {"num_labels": 1}),
    "classification": ("BertForSequenceClassification", {"num_labels": 3}),
    "seq2seq": ("T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", [task for task in TASKS if task != "script"])
def test_a_pretrained_model_of_ones_own_passes_check(task: str, here: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models, trainers

    trained = Tokenizer(models.BPE())
    special = ["<pad>", "<eos>"]
    trained.train_from_iterator(
        map(command_of, range(ROWS)), trainers.BpeTrainer(vocab_size=200, special_tokens=special)
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, pad_token="<pad>", eos_token="<eos>"
    )
    name, more = CLASSES.get(task, ("LlamaForCausalLM", {}))
    kind = getattr(transformers, name)
    small = {"llama": new_study._LLAMA}.get(kind.config_class.model_type) or new_study._SMALL[task]
    config = kind.config_class(
        **{key: value for key, value in small.items() if key != "model_type"},
        vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, **more,
    )  # fmt: skip
    if kind.config_class.model_type == "llama":
        config.max_position_embeddings = 48
    kind(config).save_pretrained(here / "models" / "base")
    tokenizer.save_pretrained(here / "models" / "base")
    study = made(*options(task, "models/base"))
    assert study["workload"]["model"] == {"name_or_path": "./models/base"}
    assert "tokenizer" not in study["workload"]
    if kind.config_class.model_type == "llama":
        longest = study["workload"]["sequence_length"]
        assert longest + study["workload"].get("max_completion_length", 0) <= 48
    done = within("check", "study.yaml")
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------
# at a terminal


class Terminal(io.StringIO):
    """The lines that a user types."""

    def isatty(self) -> bool:
        return True


def typed(*lines: str, arguments: Iterable[object] = ()) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))
        return within("init", *arguments)


def test_six_questions_with_proposals_from_the_data(here: Path) -> None:
    for name in ("text.txt", "chats.jsonl", "pairs.jsonl", "queries.jsonl"):
        Path(name).unlink()
    done = typed("", "", "", "", "", "FRA", "")
    assert done.returncode == 0, done.stderr
    assert [f"{number}/6" in done.stdout for number in range(1, 8)] == [True] * 6 + [False]
    study = yaml.safe_load(Path("study.yaml").read_text())
    assert study["workload"]["task"] == "classification"
    assert study["workload"]["dataset"]["train_files"] == ["intents.jsonl"]
    # A third of the rows has the commonest label: 1/3 + 0.8 × 2/3.
    assert study["target"] == {"accuracy": 0.86}
    assert study["budget"] == {"trials": 20, "until": "converged"}
    assert study["carbon"] == {"country": "FRA"}
    assert within("check", "study.yaml").returncode == 0


def test_a_wrong_answer_is_asked_for_again(here: Path) -> None:
    done = typed(
        "sfft", "sft", "nothing.jsonl", "text.txt", "chats.jsonl", "no model", "from_config", "-3", "low",
        "50", "0,0", "none", "Germania", "germany", "soon", "2h",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    study = yaml.safe_load(Path("study.yaml").read_text())
    assert study["workload"]["task"] == "sft"
    assert study["target"] == {"perplexity": 50.0}
    assert study["budget"] == {"hours": 2, "until": "converged"}
    assert study["carbon"]["country"] == "DEU"
    for word in (
        "did you mean sft?",
        "'nothing.jsonl'",
        "text.txt",
        "'no model'",
        "-3",
        "'Germania'",
    ):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("answer", "budget"),
    [
        ("5 trials", {"trials": 5}),
        ("1 trial", {"trials": 1}),
        ("0.5 hours", {"hours": 0.5}),
        ("20 trials, 8 h", {"trials": 20, "hours": 8}),
        ("8h 20", {"trials": 20, "hours": 8}),
    ],
)
def test_a_budget_may_have_its_units_in_words(answer: str, budget: dict[str, Any]) -> None:
    assert parse_budget(answer) == budget


def test_the_file_whose_columns_the_task_knows_is_proposed(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b\n1,2\n")
    assert proposed_data(tmp_path) == proposed_data(tmp_path, "causal_lm") == "train.csv"
    write_rows(tmp_path / "train.jsonl", [{"text": "a"}])
    assert proposed_data(tmp_path) == proposed_data(tmp_path, "causal_lm") == "train.jsonl"
    write_rows(tmp_path / "other.jsonl", [{"text": "a", "label": "b"}])
    assert proposed_data(tmp_path, "causal_lm") == "train.jsonl"
    assert proposed_data(tmp_path, "classification") == "other.jsonl"


def test_a_column_without_a_usual_name_is_asked_for(here: Path) -> None:
    write_rows(here / "odd.jsonl", ({"words": command_of(i), "kind": i % 2} for i in range(ROWS)))
    done = typed(
        "word", "words", "kind",
        arguments=[*options("classification")[:4], "--data", "odd.jsonl", "--target", "0.9", *COMMON],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dataset = yaml.safe_load(Path("study.yaml").read_text())["workload"]["dataset"]
    assert (dataset["text_column"], dataset["label_column"]) == ("words", "kind")


def pictures(*classes: str) -> None:
    from PIL import Image

    for folder in map(Path, classes):
        folder.mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")


@pytest.mark.parametrize("place", [".", "pic", "data", "data/pic"])
@pytest.mark.parametrize("split", ["", "train"])
def test_classification_is_proposed_for_folders_of_pictures(
    place: str, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pictures(*(f"{place}/{split}/{kind}" for kind in ("cat", "dog")))
    Path("notes.txt").write_text("two kinds of pets\n")
    done = typed("", "", "", "", "", "FRA", "")
    assert done.returncode == 0, done.stderr
    workload = load_study(tmp_path / "study.yaml").workload
    assert workload.task == "classification"
    assert Path(str(workload.dataset.name_or_path)) == tmp_path / place


def test_folders_that_hold_more_than_pictures_are_not_proposed(here: Path) -> None:
    pictures("site/img", "site/icons")
    Path("site/img/more").mkdir()
    Path("site/icons/index.html").write_text("")
    Path("intents.jsonl").unlink()
    assert proposed_data(here, "classification") == "chats.jsonl"
    pictures("pets/cat", "pets/dog")
    assert proposed_data(here, "classification") == "pets"
    assert proposed_data(here, "sft") == proposed_data(here) == "chats.jsonl"


# Rows of two inputs, with the task, the column that has a usual name, and those that are not read.
TWO_INPUTS: dict[str, tuple[str, dict[str, str], str, list[str]]] = {
    "alpaca": ("sft", {"instruction": "add this", "output": "3"}, "prompt_column", ["input"]),
    "dolly": (
        "sft",
        {"instruction": "who is it", "context": "it is a king", "response": "a king"},
        "prompt_column",
        ["context"],
    ),
    "qnli": (
        "classification",
        {"question": "who is it", "sentence": "it is a king"},
        "text_column",
        ["question"],
    ),
    "sql": (
        "seq2seq",
        {"question": "how many", "context": "CREATE TABLE a", "answer": "SELECT 1"},
        "source_column",
        ["context"],
    ),
}


def two_inputs(kind: str) -> list[str]:
    """Write rows of a kind to odd.jsonl, and return the options for them."""
    task, texts, _, _ = TWO_INPUTS[kind]
    rows = [{**texts, "label": i % 2, "idx": i} for i in range(ROWS)]
    if kind == "alpaca":  # where a row has no input, the column may be missing
        rows = [{**row, **({"input": "1 and 2"} if row["idx"] % 2 else {})} for row in rows]
    write_rows(Path("odd.jsonl"), rows)
    chosen = options(task)
    chosen[chosen.index("--data") + 1] = "odd.jsonl"
    return chosen


@pytest.mark.parametrize("kind", TWO_INPUTS)
def test_columns_that_are_not_read_are_named(kind: str, here: Path) -> None:
    done = within("init", *two_inputs(kind))
    assert done.returncode == 0, done.stderr
    line = next(it for it in Path("study.yaml").read_text().splitlines() if "dataset:" in it)
    _, _, comment = line.partition("#")
    checked = within("check", "study.yaml").stdout
    reads = next(it for it in checked.splitlines() if it.startswith("  reads"))
    for text in (done.stderr, comment, reads):
        for name in TWO_INPUTS[kind][3]:
            assert repr(name) in text
        assert "idx" not in text


@pytest.mark.parametrize("kind", ["dolly", "qnli", "sql"])
@pytest.mark.parametrize("answer", ["", "other"])
def test_which_of_several_inputs_is_meant_is_asked(kind: str, answer: str, here: Path) -> None:
    _, _, key, (other,) = TWO_INPUTS[kind]
    proposed = "sentence" if kind == "qnli" else next(iter(TWO_INPUTS[kind][1]))
    done = typed("gone", other if answer else "", arguments=two_inputs(kind))
    assert done.returncode == 0, done.stderr
    dataset = yaml.safe_load(Path("study.yaml").read_text())["workload"]["dataset"]
    assert dataset[key] == (other if answer else proposed)
    assert f"[{proposed}]" in done.stdout and "'gone'" in done.stdout
    assert repr(proposed if answer else other) in done.stderr


def test_nothing_is_said_or_asked_where_all_texts_are_read(here: Path) -> None:
    rows = (
        {"text": command_of(i), "label": "ab"[i % 2], "n": i, "day": "2024-01-02"}
        for i in range(ROWS)
    )
    write_rows(here / "odd.jsonl", rows)
    answers = options("classification")
    answers[answers.index("--data") + 1] = "odd.jsonl"
    done = typed(arguments=answers)
    assert (done.returncode, done.stderr) == (0, "")
    assert "not read" not in Path("study.yaml").read_text()
    assert "  reads" not in within("check", "study.yaml").stdout


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
def test_columns_that_are_not_read_are_named_of_every_kind_of_file(kind: str, here: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "a b", "context": "c d", "response": "e", "n": 1}] * ROWS
    path = here / f"odd.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(["prompt,context,response,n", *["a b,c d,e,1"] * ROWS]) + "\n")
    answers = options("sft")
    answers[answers.index("--data") + 1] = path.name
    made(*answers)
    assert "not read: 'context'\n" in Path("study.yaml").read_text()


def test_an_empty_answer_about_a_column_asks_for_other_data(here: Path) -> None:
    write_rows(here / "useless.jsonl", [{"a": "b", "c": "d"}] * 2)
    done = typed("useless.jsonl", "", "text.txt", arguments=[*options("causal_lm")[:2], *COMMON])
    assert done.stdout.count("2/6") == 2, done.stdout


def test_the_end_of_the_input_leaves_no_file(here: Path) -> None:
    done = typed("sft", "chats.jsonl")
    assert done.returncode == 2
    assert "--model" in done.stderr
    assert not Path("study.yaml").exists()


@pytest.mark.parametrize(
    ("answer", "values"),
    [
        ("8,16", {"choices": [8, 16]}),
        ("0,0.5", {"choices": [0, 0.5]}),
        ("010,10", {"choices": ["010", 10]}),
        ("-007", "-007"),
    ],
)
def test_a_value_stays_the_word_that_was_typed(answer: str, values: object) -> None:
    assert parse_values("w", answer) == values


def test_the_end_of_the_input_at_a_question_within_another_ends_the_command(here: Path) -> None:
    Path("table.csv").write_text("id,story\n1,once\n2,twice\n")
    done = typed("causal_lm", "table.csv")
    assert done.returncode == 2
    assert "--column" in done.stderr and done.stdout.count("2/6") == 1
    assert not Path("study.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "code", "words"),
    [(b"\x03", 130, "interrupted"), (b"\x04", 2, "--task"), (b"\xff\xfe\n\x04", 2, "--task")],
    ids=["ctrl-c", "ctrl-d", "not-utf-8"],
)
def test_keys_at_a_real_terminal_leave_no_file(
    keys: bytes, code: int, words: str, here: Path
) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "carbonopt", "init"],
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        preexec_fn=_take_terminal, env={**os.environ, "PYTHONUTF8": "1"},
    )  # fmt: skip
    os.close(follower)
    shown = _shown_until(leader, b"1/6")
    for key in (keys[place : place + 1] for place in range(len(keys))):
        time.sleep(0.1)
        os.write(leader, key)
    shown += _shown_until(leader, None)
    os.close(leader)
    assert process.wait(timeout=60) == code, shown
    assert words in shown.decode(errors="replace")
    assert b"Traceback" not in shown
    assert not Path("study.yaml").exists()


def _shown_until(leader: int, text: bytes | None) -> bytes:
    """What a terminal has shown until some text, or until its process has ended."""
    shown = b""
    while text is None or text not in shown:
        try:
            shown += os.read(leader, 1000)
        except OSError:  # nobody has the terminal open any more
            assert text is None, shown
            break
    return shown


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


# ---------------------------------------------------------------------------------------------------
# what is refused


def test_missing_options_are_named_where_nobody_can_be_asked(here: Path) -> None:
    common = "--target, --gpus, --country, --budget are missing"
    assert f"--task, --data, --model, {common}" in refusal("init")
    assert f"--task, {common}" in refusal("init", "--command", COMMAND)
    assert "--data, --model, --target, --gpus, --country, --budget are missing" in refusal(
        "init", "--task", "sft"
    )
    assert "--command" in refusal("init", "--task", "script")
    assert "--reward is missing" in refusal(
        "init", *(it for it in options("rlhf") if it not in ("--reward", "reward.py:brevity"))
    )
    assert not Path("study.yaml").exists()


WRONG: list[tuple[str, str, str, list[str]]] = [
    ("sft", "--task", "sfft", ["sfft", "did you mean sft?"]),
    ("sft", "--data", "nowhere.jsonl", ["--data", "nowhere.jsonl"]),
    ("sft", "--data", "python-doc", ["--data", "did you mean python-docs?"]),
    ("sft", "--data", "text.txt", ["text.txt", "columns"]),
    ("sft", "--data", "empty", ["empty", "holds neither"]),
    ("sft", "--data", "empty.jsonl", ["empty.jsonl", "empty"]),
    ("sft", "--data", "list.jsonl", ["list.jsonl"]),
    ("sft", "--data", "broken.jsonl", ["broken.jsonl"]),
    ("sft", "--data", "latin.jsonl", ["latin.jsonl", "UTF-8"]),
    ("sft", "--data", "numbers.jsonl", ["'prompt'", "line 1", "int"]),
    ("sft", "--data", "queries.jsonl", ["response_column", "'question'", "'sql'"]),
    ("sft", "--data", "messages.jsonl", ["--model", "chat template"]),
    ("causal_lm", "--data", "latin.txt", ["latin.txt", "UTF-8"]),
    ("causal_lm", "--data", "nul.txt", ["nul.txt", "NUL"]),
    ("causal_lm", "--data", "empty.txt", ["empty.txt"]),
    ("causal_lm", "--data", "book.pdf", ["book.pdf", "convert"]),
    ("classification", "--data", "nulls.jsonl", ["'intent'", "line 1", "line 1 has none"]),
    ("classification", "--data", "pairs.jsonl", ["label_column", "'prompt'"]),
    ("seq2seq", "--data", "python-docs", ["--data", "'python-docs'"]),
    ("sft", "--model", "nowhere", ["--model", "'nowhere'"]),
    ("sft", "--model", "empty", ["config.json"]),
    ("sft", "--model", "t5", ["t5", "encoder-decoder", "sft"]),
    ("sft", "--model", "untyped", ["model_type"]),
    ("sft", "--model", "broken", ["config.json", "JSON"]),
    ("sft", "--target", "0.5", ["perplexity", "0.5"]),
    ("sft", "--target", "accuracy=0.5", ["perplexity", "'accuracy'"]),
    ("sft", "--target", "perplexity>=20", ["perplexity", "at most"]),
    ("sft", "--target", "nan", ["--target", "'nan'"]),
    ("script", "--target", "0.5", ["--target", "name"]),
    ("script", "--target", "bleu=30", ["bleu>=30", "bleu<=30"]),
    ("script", "--command", "python train.py", ["--command", "placeholder"]),
    ("script", "--command", "python gone.py {learning_rate} {hidden}", ["gone.py"]),
    ("script", "--values", "hiden=3", ["hiden", "hidden"]),
    ("rlhf", "--reward", "gone.py:brevity", ["--reward", "gone.py"]),
    ("rlhf", "--reward", "reward.py:", ["--reward"]),
    ("rlhf", "--reward", "reward.py:brevty", ["--reward", "brevty", "did you mean brevity?"]),
    ("rlhf", "--reward", "reward.py:print", ["--reward", "no function print"]),
    ("rlhf", "--reward", "text.txt:brevity", ["--reward", "text.txt", "Python"]),
    ("classification", "--data", "alone.jsonl", ["'intent'", "'play'"]),
    ("classification", "--data", "two.jsonl", ["eval_fraction", "every class has one"]),
    ("classification", "--data", "mixed.jsonl", ["'intent'", "line 1 has '1'", "line 2 has 1"]),
    ("classification", "--data", "pictures", ["'label'", "'cat'"]),
    ("sft", "--data", "one.jsonl", ["eval_fraction", "1"]),
    ("reward", "--data", "null.jsonl", ["'chosen'", "line 1", "answer"]),
    ("dpo", "--data", "null.jsonl", ["'chosen'", "line 1", "answer"]),
    ("dpo", "--data", "late.jsonl", ["'rejected'", "line 9", "answer"]),
    ("dpo", "--data", "evaluated", ["'chosen'", "test.jsonl, line 3", "answer"]),
    ("rlhf", "--data", "null.jsonl", ["'prompt'", "line 2", "prompt"]),
    ("sft", "--data", "unanswered.jsonl", ["training", "'response'", "none of 9"]),
    ("sft", "--data", "late-answer.jsonl", ["evaluation", "'response'", "none of 1"]),
    ("seq2seq", "--data", "sqls.jsonl", ["training", "'question', 'sql'", "none of 9"]),
    ("classification", "--data", "splits", ["test.jsonl, line 2", "'pause'", "play, stop"]),
    ("classification", "--data", "spelt", ["test.jsonl, line 1", "'play '", "'play'"]),
    ("classification", "--data", "blank.jsonl", ["'text'", "line 2", "empty"]),
    ("classification", "--data", "birds", ["'bird'", "cat, dog"]),
    ("causal_lm", "--data", "short.txt", ["16 tokens", "at most 12"]),
    ("causal_lm", "--data", "short.jsonl", ["16 tokens", "at most 15"]),
    ("causal_lm", "--data", "blanks.jsonl", ["training", "'text'", "none of 2"]),
    ("causal_lm", "--data", "letter.txt", ["eval_fraction", "1 characters"]),
    ("sft", "--gpus", "first", ["--gpus", "'first'"]),
    ("sft", "--gpus", "0,0", ["--gpus", "differ"]),
    ("sft", "--country", "Germania", ["--country", "'Germania'", "DEU"]),
    ("sft", "--country", "XYZ", ["country", "XYZ"]),
    ("sft", "--budget", "0", ["--budget", "'0'"]),
    ("sft", "--budget", "1.5", ["--budget", "'1.5'"]),
    ("sft", "--budget", "3h 4h", ["--budget", "3h 4h"]),
    ("sft", "--budget", "", ["--budget", "''"]),
    ("sft", "--budget", "5 trials 6 trials", ["--budget", "'5 trials 6 trials'"]),
    ("sft", "--budget", "5 trails", ["--budget", "'5 trails'"]),
    ("sft", "--budget", "hours", ["--budget", "'hours'"]),
    ("sft", "--column", "prompt_column=words", ["prompt_column", "words"]),
    ("sft", "--column", "label_column=prompt", ["label_column"]),
    ("sft", "--column", "prompt", ["--column", "NAME=VALUE"]),
    ("sft", "--reward", "reward.py:brevity", ["--reward", "sft"]),
    ("sft", "--command", COMMAND, ["--command", "sft"]),
    ("script", "--data", "chats.jsonl", ["--data", "script"]),
    ("sft", "--out", "nowhere/study.yaml", ["--out", "nowhere"]),
    ("sft", "--out", "text.txt", ["--out", "text.txt", "there already"]),
    ("sft", "--out", "empty", ["--out", "empty", "there already"]),
    ("sft", "--out", "...", ["'...'"]),
    ("sft", "--out", "a" * 300, ["--out", "aaa", "too long"]),
    ("sft", "--data", "", ["--data", "empty"]),
    ("sft", "--data", "~foo/x", ["--data", "'~foo/x'"]),
    ("sft", "--model", "~nouser/x", ["--model", "'~nouser/x'"]),
    ("sft", "--model", "a/..", ["--model", "'a/..'"]),
    ("rlhf", "--reward", "~x/r.py:f", ["--reward", "'~x/r.py'"]),
    ("rlhf", "--reward", "~x/r", ["--reward", "'~x/r'"]),
    ("script", "--command", 'python train.py "{hidden:.3f}', ["--command", '"{hidden:.3f}']),
    ("sft", "--budget", "99999999999999999999", ["--budget", "'99999999999999999999'"]),
]  # fmt: skip


@pytest.fixture
def wrong_files(here: Path) -> Path:
    for name in ("empty", "t5", "untyped", "broken"):
        (here / name).mkdir()
    (here / "t5/config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    (here / "untyped/config.json").write_text("{}")
    (here / "broken/config.json").write_text("{")
    (here / "empty.jsonl").write_text("")
    (here / "empty.txt").write_text(" \n")
    (here / "list.jsonl").write_text("[1, 2]\n")
    (here / "broken.jsonl").write_text('{"prompt": \n')
    (here / "latin.jsonl").write_bytes('{"prompt": "é", "response": "é"}\n'.encode("latin-1"))
    (here / "latin.txt").write_bytes("é".encode("latin-1"))
    (here / "nul.txt").write_text("a\0b")
    (here / "book.pdf").write_text("%PDF")
    write_rows(here / "numbers.jsonl", [{"prompt": 3, "response": "three"}])
    intents = {"alone": ["play"] * 9, "two": ["play", "stop"], "mixed": ["1", 1] * 9}
    for name, labels in intents.items():
        write_rows(here / f"{name}.jsonl", [{"text": "a", "intent": label} for label in labels])
    write_rows(here / "one.jsonl", [{"prompt": "a", "response": "b"}])
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    write_rows(here / "null.jsonl", [{**pair, "chosen": None}, {**pair, "prompt": ""}] * 5)
    write_rows(here / "late.jsonl", [*[pair] * 8, {**pair, "rejected": " "}])
    (here / "evaluated").mkdir()
    write_rows(here / "evaluated/train.jsonl", [pair] * 9)
    write_rows(here / "evaluated/test.jsonl", [pair, pair, {**pair, "chosen": None}])
    chat = {"prompt": "a", "response": "b"}
    write_rows(here / "unanswered.jsonl", [{**chat, "response": ""}] * 10)
    write_rows(here / "late-answer.jsonl", [*[chat] * 9, {**chat, "response": " "}])
    write_rows(here / "sqls.jsonl", [{"question": None, "sql": "b"}] * 10)
    for name, labels in {"splits": ["play", "pause"], "spelt": ["play ", "stop"]}.items():
        (here / name).mkdir()
        for file, words in {"train": ["play", "stop"] * 9, "test": labels}.items():
            rows = [{"text": "a", "intent": word} for word in words]
            write_rows(here / name / f"{file}.jsonl", rows)
    write_rows(here / "blank.jsonl", [{"text": text, "intent": text} for text in ("a", " ")])
    pictures(*(f"birds/train/{kind}" for kind in ("cat", "dog")), "birds/val/bird")
    (here / "short.txt").write_text("hello world")
    write_rows(here / "short.jsonl", [{"text": "ab"}] * 4)
    write_rows(here / "blanks.jsonl", [{"text": ""}] * 2)
    (here / "letter.txt").write_text("a")
    (here / "pictures/cat").mkdir(parents=True)
    (here / "pictures/cat/a.png").write_bytes(b"")
    (here / "pictures/cat/b.png").write_bytes(b"")
    write_rows(here / "nulls.jsonl", [{"text": "a", "intent": None}])
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_rows(here / "messages.jsonl", [{"messages": chat}] * ROWS)
    return here


@pytest.mark.parametrize(("task", "option", "value", "words"), WRONG)
def test_wrong_answers_are_refused_and_leave_no_file(
    task: str, option: str, value: str, words: list[str], wrong_files: Path
) -> None:
    answers = options(task)
    if option in answers and option != "--values":
        answers[answers.index(option) + 1] = value
    else:
        answers += [option, value]
    before = sorted(wrong_files.rglob("*"))
    sentence = refusal("init", *answers)
    for word in words:
        assert word in sentence
    assert sorted(wrong_files.rglob("*")) == before


@pytest.mark.parametrize("data", ["./~t.txt", "./~/x.txt"])
def test_a_name_that_begins_with_a_tilde_is_no_home(data: str, here: Path) -> None:
    (here / "~").mkdir()
    (here / data).write_text(Path("text.txt").read_text())
    answers = options("causal_lm")
    answers[answers.index("--data") + 1] = data
    made(*answers)
    assert load_study(here / "study.yaml").workload.dataset.train_files == (str(here / data[2:]),)


@pytest.mark.parametrize("name", ["-x.yaml", "~x.yaml"])
def test_the_command_that_is_printed_reads_the_file(name: str, here: Path) -> None:
    done = within("init", *options("causal_lm"), f"--out=./{name}")
    assert done.returncode == 0, done.stderr
    printed = next(line for line in done.stdout.splitlines() if "carbonopt check" in line)
    command = shlex.split(printed)[1:]
    assert command == ["check", f"./{name}"]
    assert within(*command).returncode == 0


def test_nothing_is_overwritten(here: Path) -> None:
    Path("study.yaml").write_text("mine\n")
    assert "study.yaml is there already" in refusal("init", *options("sft"))
    Path("study.yaml").unlink()
    Path("study.yaml").symlink_to("elsewhere.yaml")
    assert "study.yaml is there already" in refusal("init", *options("sft"))
    assert not Path("elsewhere.yaml").exists()


def test_names_that_no_line_can_hold_are_refused(here: Path) -> None:
    for name in ("two\nlines.txt", "a\x1b[31m.txt", "a\u2028b.txt"):
        (here / name).write_text(Path("text.txt").read_text())
        answers = options("causal_lm")
        answers[answers.index("--data") + 1] = name
        assert "printable" in refusal("init", *answers)
    broken = os.fsdecode(b"\xff.txt")
    (here / broken).write_text(Path("text.txt").read_text())
    answers[answers.index("--data") + 1] = broken
    assert "printable" in refusal("init", *answers)
    assert not Path("study.yaml").exists()


def test_a_file_that_cannot_be_made_is_refused(here: Path) -> None:
    assert "can't write /proc/study.yaml" in refusal(
        "init", *options("sft"), "--out", "/proc/study.yaml"
    )


def test_it_loads_nothing_heavy(here: Path) -> None:
    script = (
        "import sys\nfrom carbonopt.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'transformers', 'datasets', 'deepspeed'} & sys.modules.keys())"
    )
    for arguments in (["init", *options("sft")], ["schema"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "set()", done.stdout[-300:]

"""Words of a command and whether they are what a program gets."""

import subprocess

import pytest

from carbonopt.train.scripts.command import Command, without_comments


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python 'run$1.py' {x}", ["python", "run$1.py", "3"]),
        ("python 'a*b?.py' {x}", ["python", "a*b?.py", "3"]),
        (r'printf %s "my\$x" {x}', None),
        (r'printf %s "a\`b" {x}', None),
        (r"printf %s 'my\$x' {x}", None),
    ],
)
def test_words_are_what_a_shell_makes_of_them(text: str, words: list[str] | None) -> None:
    command = Command.parse(text)
    argv = command.argv({"x": 3})
    if words is not None:
        assert argv == words and all(command.literal(word) for word in command.words[:2])
        return
    said, of_shell = (
        subprocess.run(ran, capture_output=True, check=True).stdout
        for ran in (argv, ["bash", "-c", text.replace("{x}", "3")])
    )
    assert said == of_shell


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("# it's mine\nrun {x}", "\nrun {x}"),
        ("run {x} # the rate\n  --more 1", "run {x} \n  --more 1"),
        ("run {x} \\\n  # --off {y} \\\n  --more 1", "run {x} \\\n  \n  --more 1"),
        ("run {x} \\\n# --off {y}\n--more 1", "run {x} \\\n\n--more 1"),
        ("run {x} # --more {y}", "run {x} "),
        ("(run {x};# one\n)", "(run {x};\n)"),
        ("run a#b ${#c} $# '# d' \"e # f\" \\# \\ #", None),
        ("cat <<EOF\n# rate\nEOF", None),
        ("cat <<< a # b", "cat <<< a "),
    ],
)
def test_comments_are_left_out(text: str, left: str | None) -> None:
    assert without_comments(text) == (text if left is None else left)


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("conda run --no-capture-output -n deepspeed python train.py", "python"),
        ("conda run -p /envs/deepspeed python train.py", "python"),
        ("time -p torchrun train.py", "torchrun"),
        ("uv run accelerate launch train.py", "accelerate"),
        ("/usr/bin/env -u accelerate python -W ignore -um torch.distributed.run x.py", "torch.distributed.run"),
        ("nice -n 5 ./train.sh torchrun.log", "nice"),
        ("python train.py --backend deepspeed", "python"),
        ("env -S 'torchrun train.py'", "torchrun"),
        ("/usr/bin/env -i -vS 'A=1 python -m torch.distributed.run' x.py", "torch.distributed.run"),
        ("nohup env --split-string='accelerate launch' x.py", "accelerate"),
        ("env A=1 python train.py -S 'torchrun x'", "python"),
    ],
)  # fmt: skip
def test_a_launcher_is_found_behind_what_starts_it(command: str, launcher: str) -> None:
    found = Command.parse(command).simple[0].launcher
    assert found == launcher


def test_documents_belong_to_the_programs_that_read_them() -> None:
    text = "cat <<A | sort - <<'B' > out\nit's a > b\nA\n  c\nB\nrun <<< 'd e'\nrest <<C\nf"
    command = Command.parse(text)
    found = [(each.words, each.documents, each.outputs) for each in command.simple]
    assert found == [
        (("cat",), ("it's a > b\n",), ()),
        (("sort", "-"), ("  c\n",), ("out",)),
        (("run",), ("d e",), ()),
        (("rest",), ("f",), ()),
    ]


def test_programs_in_the_code_of_shells_are_programs() -> None:
    text = "bash -c 'one | two'\nsh -s x <<'EOF'\nthree\nEOF\npython -c 'four'"
    names = [each.words[0] for each in Command.parse(text).programs]
    assert names == ["bash", "one", "two", "sh", "three", "python"]


@pytest.mark.parametrize(
    ("command", "folders"),
    [
        ("env -C a numactl -C 0-3 python x.py -C b", ("a",)),
        ("make -C a train", ("a",)),
        ("conda run --cwd a -n me python x.py", ("a",)),
        ("apptainer exec -C a python x.py", ()),
        ("srun --chdir=a python x.py", ("a",)),
    ],
)
def test_folders_that_starters_change_to(command: str, folders: tuple[str, ...]) -> None:
    assert Command.parse(command).simple[0].folders == folders

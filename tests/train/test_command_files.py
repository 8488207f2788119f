"""Which files a command reads, as far as its words, imports and shell scripts tell."""

import os
import shlex
from pathlib import Path

import pytest

from carbonopt.train.scripts.command_files import CommandFiles
from carbonopt.train.scripts.script_sources import command_files
from carbonopt.train.tasks.script import Script, ScriptWorkload


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def found(command: str, folder: Path) -> tuple[set[str], set[str]]:
    """Code and other files, relative to the folder."""
    files = CommandFiles.of([command.split()], folder)
    program, named = (
        {os.path.relpath(path, folder) for path in paths} for paths in (files.program, files.named)
    )
    return program, named


CASES = {
    "a module beside it": (
        "python train.py",
        {"train.py": "from base import *", "base.py": ""},
        {"train.py", "base.py"},
        set(),
    ),
    "a package": (
        "python train.py",
        {
            "train.py": "import lib.model as m",
            "lib/__init__.py": "",
            "lib/model.py": "from . import a",
            "lib/a.py": "",
        },
        {"train.py", "lib/__init__.py", "lib/model.py", "lib/a.py"},
        set(),
    ),
    "a module of a package": (
        "python -m pkg.train",
        {
            "pkg/__init__.py": "",
            "pkg/train.py": "from .sub.b import c",
            "pkg/sub/b.py": "from ..d import e",
            "pkg/d.py": "",
        },
        {"pkg/__init__.py", "pkg/train.py", "pkg/sub/b.py", "pkg/d.py"},
        set(),
    ),
    "a package that runs": (
        "python -m pkg",
        {"pkg/__main__.py": "import helper", "helper.py": ""},
        {"pkg/__main__.py", "helper.py"},
        set(),
    ),
    "an import in a function": (
        "torchrun --nproc_per_node 2 train.py",
        {"train.py": "def main():\n    import late", "late.py": ""},
        {"train.py", "late.py"},
        set(),
    ),
    "an import by name": (
        "accelerate launch train.py",
        {"train.py": "import importlib\nimportlib.import_module('late')", "late.py": ""},
        {"train.py", "late.py"},
        set(),
    ),
    "a shell script": (
        "bash run.sh",
        {
            "run.sh": "cd code\npython train.py --config=$ROOT/c.yaml",
            "code/train.py": "import a",
            "code/a.py": "",
            "c.yaml": "",
        },
        {"run.sh", "code/train.py", "code/a.py"},
        {"c.yaml"},
    ),
    "a shell script by its first line": (
        "./start",
        {"start": '#!/bin/bash\nexec python "$(dirname "$0")/train.py" "$@"', "train.py": ""},
        {"start", "train.py"},
        set(),
    ),
    "an option's program": (
        "python train.py --config=c/d.py",
        {"train.py": "", "c/d.py": "import e", "c/e.py": ""},
        {"train.py", "c/d.py", "c/e.py"},
        set(),
    ),
    "an option's file": (
        "python train.py --config c.yaml",
        {"train.py": "", "c.yaml": ""},
        {"train.py"},
        {"c.yaml"},
    ),
    "a variable's file": (
        "python train.py data.file=d.csv",
        {"train.py": "", "d.csv": ""},
        {"train.py"},
        {"d.csv"},
    ),
    "an option's folder": (
        "python train.py --data rows",
        {"train.py": "", "rows/a.csv": ""},
        {"train.py"},
        {"rows"},
    ),
    "a program in a text": (
        "python train.py",
        {"train.py": "exec(open('configurator.py').read())", "configurator.py": ""},
        {"train.py", "configurator.py"},
        set(),
    ),
    "a file in a text": (
        "python train.py",
        {"train.py": "rows = open('data/rows.csv')", "data/rows.csv": ""},
        {"train.py"},
        {"data/rows.csv"},
    ),
    "a script elsewhere": (
        "python ../lib/train.py",
        {"x": "", "../lib/train.py": "import base", "../lib/base.py": ""},
        {"../lib/train.py", "../lib/base.py"},
        set(),
    ),
    "modules elsewhere": (
        "python train.py",
        {"train.py": "import sys\nsys.path.append('../lib')\nimport base", "../lib/base.py": ""},
        {"train.py", "../lib/base.py"},
        set(),
    ),
    "modules beside the file's folder": (
        "python run/train.py",
        {
            "run/train.py": "import os, sys\nROOT = os.path.dirname(os.path.dirname(os.path"
            ".abspath(__file__)))\nsys.path.insert(0, os.path.join(ROOT, 'lib'))\nimport base",
            "lib/base.py": "",
        },
        {"run/train.py", "lib/base.py"},
        set(),
    ),
    "modules above the file's folder": (
        "python run/deep/train.py",
        {
            "run/deep/train.py": "import sys\nfrom pathlib import Path\n"
            "sys.path += [str(Path(__file__).resolve().parents[2] / 'lib')]\nimport base",
            "lib/base.py": "",
        },
        {"run/deep/train.py", "lib/base.py"},
        set(),
    ),
    "a name that stands for itself": (
        "python train.py",
        {"train.py": "import sys\nX = X / 'lib'\nsys.path.extend([X, Y.parents[9]])"},
        {"train.py"},
        set(),
    ),
    "a compiled module": (
        "python train.py",
        {"train.py": "import kernels", "kernels.abi3.so": ""},
        {"train.py", "kernels.abi3.so"},
        set(),
    ),
    "a pattern of files": (
        "python train.py --data=rows/*.csv",
        {"train.py": "", "rows/a.csv": "", "rows/b.csv": "", "rows/c.txt": ""},
        {"train.py"},
        {"rows/a.csv", "rows/b.csv"},
    ),
    "a list of files": (
        "python train.py --data train.csv,eval=eval.csv",
        {"train.py": "", "train.csv": "", "eval.csv": ""},
        {"train.py"},
        {"train.csv", "eval.csv"},
    ),
    "a file of options": (
        "python train.py @args.txt",
        {"train.py": "", "args.txt": ""},
        {"train.py"},
        {"args.txt"},
    ),
    "a Makefile": (
        "make train",
        {"Makefile": "train:\n\tpython train.py", "train.py": "import a", "a.py": ""},
        {"Makefile", "train.py", "a.py"},
        set(),
    ),
    "an option -c of a script": (
        "python train.py -c c.yaml",
        {"train.py": "", "c.yaml": ""},
        {"train.py"},
        {"c.yaml"},
    ),
    "installed modules": (
        "python train.py",
        {"train.py": "import json, numpy, carbonopt.script"},
        {"train.py"},
        set(),
    ),
    "all that lies there": (
        "python train.py --out .",
        {"train.py": "this is no Python"},
        {"train.py"},
        set(),
    ),
}


@pytest.mark.parametrize(("command", "files", "program", "named"), CASES.values(), ids=CASES.keys())
def test_what_a_command_reads(
    command: str, files: dict, program: set, named: set, tmp_path: Path
) -> None:
    assert found(command, written(tmp_path / "here", files)) == (program, named)


ROWS = "data/rows.csv"
# The command, texts of files, and the files that it reads beside its first one.
READS = {
    "a path of parts": (
        "python t.py",
        {"t.py": "open(Path(__file__).parent / 'data' / 'rows.csv')"},
        {ROWS},
    ),
    "a path joined from a name": (
        "python t.py",
        {"t.py": "root = 'data'\nopen(os.path.join(root, 'rows.csv'))"},
        {ROWS},
    ),
    "a path in an f-string": ("python t.py", {"t.py": "D = 'data'\nopen(f'{D}/rows.csv')"}, {ROWS}),
    "an option's default": (
        "python t.py",
        {"t.py": "p.add_argument('--data-dir', default='data')\nopen(a.data_dir + '/rows.csv')"},
        {ROWS},
    ),
    "a pattern": ("python t.py", {"t.py": "glob.glob('data/*.csv')"}, {ROWS}),
    "what a configuration names": (
        "python t.py c.json",
        {"c.json": f'{{"train": "{ROWS}"}}'},
        {ROWS},
    ),
    "Hydra's folder": (
        "python t.py",
        {"t.py": "@hydra.main(config_path='conf')\ndef f(c): ...", "conf/c.yaml": ""},
        {"conf"},
    ),
    "a program without a suffix": ("python -u t", {"t": "import helper"}, {"helper.py"}),
    "a program by its first line": (
        "./t",
        {"t": "#!/usr/bin/env python3\nimport helper"},
        {"helper.py"},
    ),
    "a module right after -m": ("python -mhelper", {}, {"helper.py"}),
    "a launcher's module": ("accelerate launch --module helper", {}, {"helper.py"}),
    "an option -m of the script": ("python t.py -m data/rows.csv", {}, {ROWS}),
    "a module whose name is computed": (
        "python t.py",
        {"t.py": "import_module(f'models.{name}')", "models/a.py": ""},
        {"models/a.py"},
    ),
    "all modules of a package": (
        "python t.py",
        {
            "t.py": "import models",
            "models/__init__.py": "iter_modules(__path__)",
            "models/a.py": "",
        },
        {"models/__init__.py", "models/a.py"},
    ),
    "a quoted folder in a shell script": (
        "bash t.sh",
        {"t.sh": 'python "$(dirname "$0")"/u.py', "u.py": "import helper"},
        {"u.py", "helper.py"},
    ),
    "a shell script's path of modules": (
        "bash t.sh",
        {"t.sh": 'export PYTHONPATH="$PWD/lib:$PYTHONPATH"\npython u.py', "u.py": "import b"},
        {"u.py", "lib/b.py"},
    ),
    "a program in another language": (
        "Rscript t.R",
        {"t.R": f"source('u.R'); read('{ROWS}')", "u.R": ""},
        {"u.R", ROWS},
    ),
    "a notebook": (
        "papermill t.ipynb",
        {"t.ipynb": '{"cells": [{"cell_type": "code", "source": ["%pip\\n", "import helper"]}]}'},
        {"helper.py"},
    ),
    "an attribute of a dataclass": (
        "python t.py",
        {"t.py": "class C:\n    root: str = field(default='data')\nopen(C().root + '/rows.csv')"},
        {ROWS},
    ),
    "a name of another module": (
        "python t.py",
        {
            "t.py": "from u import D\nopen(D / 'rows.csv')",
            "u.py": "D = Path(__file__).parent / 'data'",
        },
        {"u.py", ROWS},
    ),
    "an annotated name": (
        "python t.py",
        {"t.py": "D: str = 'data'\nopen(D + '/rows.csv')"},
        {ROWS},
    ),
    "a variable's default": (
        "python t.py",
        {"t.py": "open(os.environ.get('NONE_SUCH', 'data') + '/rows.csv')"},
        {ROWS},
    ),
    "a loop over splits": (
        "python t.py",
        {"t.py": "for s in ['rows']: open(f'data/{s}.csv')"},
        {ROWS},
    ),
    "a function's argument": (
        "python t.py",
        {"t.py": "def f(s):\n    open(f'data/{s}.csv')\nf('rows')"},
        {ROWS},
    ),
    "a format": ("python t.py", {"t.py": "D = 'data'\nopen('%s/rows.csv' % D)"}, {ROWS}),
    "a click option": (
        "python t.py",
        {"t.py": "@click.option('--d', default='data')\ndef f(d): open(f'{d}/rows.csv')"},
        {ROWS},
    ),
    "a URL of a database": ("python t.py", {"t.py": f"connect('sqlite:///{ROWS}')"}, {ROWS}),
    "a URI of sqlite3": ("python t.py", {"t.py": f"connect('file:{ROWS}?mode=ro')"}, {ROWS}),
    "a file in an archive": ("python t.py", {"t.py": f"read_csv('zip://x.csv::{ROWS}')"}, {ROWS}),
    "a resource of a package": (
        "python -m helper",
        {"helper.py": "files('data') / 'rows.csv'"},
        {"helper.py", ROWS},
    ),
    "a folder that is listed": ("python t.py", {"t.py": "os.listdir('data')"}, {"data"}),
    "a local data set": ("python t.py", {"t.py": "load_dataset('data')"}, {"data"}),
    "a folder in settings": (
        "python t.py c.yaml",
        {"c.yaml": "data_dir: data\nout: lib"},
        {"data"},
    ),
    "a class in settings": (
        "python t.py c.yaml",
        {"c.yaml": "_target_: helper.Net"},
        {"helper.py"},
    ),
    "options in a file": ("python t.py --options=@o.txt", {"o.txt": f"--data\n{ROWS}"}, {ROWS}),
    "a program that is started": (
        "python t.py",
        {"t.py": "os.system('python helper.py')\nrun([sys.executable, '-m', 'lib.b'])"},
        {"helper.py", "lib/b.py"},
    ),
    "a line of a notebook": (
        "papermill t.ipynb",
        {
            "t.ipynb": '{"cells": [{"cell_type": "code", "source": ["%run helper.py\\n", "!x data/rows.csv"]}]}'
        },
        {"helper.py", ROWS},
    ),
    "a variable of a shell script": (
        "bash t.sh",
        {"t.sh": 'D=data\npython u.py "$D/${X:-rows}.csv"', "u.py": ""},
        {"u.py", ROWS},
    ),
    "an option's folder in a shell script": (
        "bash t.sh",
        {"t.sh": "python u.py --data data --output lib", "u.py": ""},
        {"u.py", "data"},
    ),
    "another Makefile": ("make -f c.mk", {"c.mk": "all:\n\tpython helper.py"}, {"helper.py"}),
    "a justfile": ("just all", {"justfile": "all:\n  python helper.py"}, {"helper.py"}),
    "a program of the project": (
        "uv run own",
        {"pyproject.toml": "[project.scripts]\nown = 'helper:main'"},
        {"helper.py"},
    ),
    "Hydra's folder by its place": (
        "python t.py",
        {"t.py": "@hydra.main('conf', 'c')\ndef f(c): ...", "conf/c.yaml": ""},
        {"conf"},
    ),
    "a package behind a folder of its name": (
        "env PYTHONPATH=lib python t.py",
        {"t.py": "import sys\nsys.path.append('lib')\nimport data", "lib/data/__init__.py": ""},
        {"lib/data/__init__.py"},
    ),
}


@pytest.mark.parametrize(("command", "files", "reads"), READS.values(), ids=READS.keys())
def test_what_programs_read(command: str, files: dict, reads: set, tmp_path: Path) -> None:
    there = {"t.py": "", "helper.py": "", "lib/b.py": "", ROWS: ""}
    program, named = found(command, written(tmp_path, {**there, **files}))
    assert reads <= program | named
    assert not ({"helper.py", "lib/b.py", ROWS} - reads) & (program | named)


@pytest.mark.parametrize("name", ["t.yaml", "t.sh"])
def test_a_folder_to_which_settings_let_a_program_write_is_no_input(
    name: str, tmp_path: Path
) -> None:
    texts = {"t.yaml": "output_dir: out", "t.sh": "python t.py --output_dir out"}
    written(tmp_path, {**texts, "t.py": "", "out/x": ""})
    assert "out" not in found(f"bash {name}", tmp_path)[1]


def test_a_link_to_a_script_finds_what_lies_beside_the_script(tmp_path: Path) -> None:
    written(tmp_path, {"real/train.py": "import helper", "real/helper.py": ""})
    (tmp_path / "train.py").symlink_to("real/train.py")
    assert found("python train.py", tmp_path)[0] == {"train.py", "real/helper.py"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("__editable__.own.pth", "{src}\n"),
        ("__editable___own_finder.py", "MAPPING: dict[str, str] = {{'own': '{src}/own'}}"),
    ],
)
def test_a_package_installed_by_a_link_is_the_users(name: str, text: str, tmp_path: Path) -> None:
    packages = "env/lib/python3.11/site-packages"
    written(
        tmp_path,
        {
            "env/bin/python": "",
            "env/pyvenv.cfg": "",
            f"{packages}/{name}": text.format(src=tmp_path / "src"),
            "src/own/__init__.py": "",
            "src/own/model.py": "",
            "t.py": "from own import model",
        },
    )
    program, _ = found("env/bin/python t.py", tmp_path)
    assert program == {"t.py", "src/own/__init__.py", "src/own/model.py"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.py", "import helper\nx = a" + ".b()" * 900 + "\ny = ''" + " + 'b'" * 900),
        ("c.json", "[" * 100_000),
        ("n.ipynb", "[" * 100_000),
        ("n.ipynb", '{"cells": [{"cell_type": "code", "source": 3}]}'),
        ("deep.py", "x = " + "-" * 20_000 + "1"),
        ("half.py", "import glob\nglob.glob('\\ud800/*')\nopen('\\ud800')"),
        ("root.py", "import glob\nglob.glob('/*/*/*/*/*/*.bin')"),
        ("kernel.py", "open('/proc/kmsg')"),
        ("run.sh", "".join(f"cd d{i % 4}\n" for i in range(60)) + "python helper.py"),
        # Both would take hours if what was read were read again for each part.
        ("open.sh", '"${' * 100_000 + "\npython helper.py"),
        ("words.sh", "python helper.py\n" + "a -m a.b cd .. " * 5_000),
        ("names.sh", '"$' + "a" * 100_000 + "\npython helper.py"),
        (
            "names.py",
            "a0 = ''\n"
            + "".join(f"a{i + 1} = f'{{a{i}}}{{a{i}}}{{a{i}}}{{a{i}}}'\n" for i in range(40))
            + "open(a40)",
        ),
    ],
)
def test_what_is_nested_deeply_or_is_something_else_makes_no_traceback(
    name: str, text: str, tmp_path: Path
) -> None:
    there = {"t.py": "import helper", "helper.py": ""}
    for folder in ("d0", "d0/d1", "d0/d1/d2", "d1", "d1/d2", "d2", "d3", "d3/d0"):
        (tmp_path / folder).mkdir()
    program, named = found(f"python t.py {name}", written(tmp_path, {**there, name: text}))
    assert {"t.py", "helper.py", name} == program | named


def test_code_longer_than_any_program_is_not_read(tmp_path: Path) -> None:
    written(tmp_path, {"t.py": "import big", "big.py": ""})
    os.truncate(tmp_path / "big.py", 300 * 2**30)  # sparse
    assert found("python t.py", tmp_path) == ({"t.py", "big.py"}, set())


@pytest.mark.parametrize("command", ["torchrun python_train.py -c conf.yaml", "pythonic -c c.yaml"])
def test_a_name_that_begins_like_pythons_is_another(command: str, tmp_path: Path) -> None:
    written(tmp_path, {"python_train.py": "", "conf.yaml": "", "c.yaml": ""})
    assert command.split()[-1] in found(command, tmp_path)[1]


def test_names_that_stand_for_themselves_end(tmp_path: Path) -> None:
    doubled = "\n".join(f"a{i} = a{i + 1} + a{i + 1}" for i in range(30))
    text = f"x = x + x\ny = f'{{y}}{{y}}'\n{doubled}\na30 = 'a'"
    assert found("python t.py", written(tmp_path, {"t.py": text}))[0] == {"t.py"}


@pytest.mark.parametrize(
    ("command", "program", "named"),
    [
        ("python train.py {x} < rows.csv", {"train.py", "helper.py"}, {"rows.csv"}),
        ("bash -c 'python train.py {x} rows.csv'", {"train.py", "helper.py"}, {"rows.csv"}),
        ("env A=1 bash -o pipefail -lc 'python train.py'", {"train.py", "helper.py"}, set()),
        ("python -u -c 'import helper; helper.main({x})'", {"helper.py"}, set()),
        ("python -c 'open(\"rows.csv\")'", set(), {"rows.csv"}),
        ("ROWS=rows.csv python train.py {x}", {"train.py", "helper.py"}, {"rows.csv"}),
        ("python train.py --data rows*.csv > rows-2.csv", {"train.py", "helper.py"}, {"rows.csv"}),
    ],
)
def test_what_a_line_of_shell_reads(
    command: str, program: set[str], named: set[str], tmp_path: Path
) -> None:
    written(tmp_path, {"train.py": "import helper", "helper.py": "", "rows.csv": ""})
    files = command_files(Script(ScriptWorkload(command=command, folder=str(tmp_path))))
    assert {path.name for path in files.program} == program
    assert {path.name for path in files.named} == named


@pytest.mark.parametrize(
    "command",
    [
        "python - {x} <<'EOF'\nfrom lib.net import Net, loss\nit = 'isn\\'t'\nEOF",
        "python3 <<-EOF\n\timport lib.net as net\n\tnet.main($RATE)\n\tEOF\necho {x}",
        "cat <<A > a.txt; uv run python - <<B\nit's {x}\nA\nfrom lib import net\nB",
        "python - {x} <<< 'import sys; import lib.net'",
        "echo 'import lib.net' | python - {x}",
        "printf '%s\\n' 'import os, lib.net' 'print(1)' | python - {x}",
        "(echo import lib.net; echo 'lib.net.main()') | python - {x}",
        "CODE='import lib.net' && python -c \"$CODE\" {x}",
        'python -c "import lib.net; lib.net.main($RATE)" {x}',
        "bash -c \"python -c 'import lib.net'\" {x}",
        "bash -s {x} <<'EOF'\npython -c 'import lib.net' $1\nEOF",
        "cat > made.py <<'EOF'\nimport importlib\nimportlib.import_module('lib.net')\nEOF\npython made.py {x}",
        "bash run.sh {x}",
        "bash call.sh {x}",
    ],
)
def test_code_in_a_command_or_a_shell_script_is_read(command: str, tmp_path: Path) -> None:
    files = {
        "lib/__init__.py": "",
        "lib/net.py": "from . import part",
        "lib/part.py": "",
        "run.sh": "python - $1 <<EOF\nfrom lib import net\nnet.main('$HOST')\nEOF\n",
        "call.sh": "python -c \"__import__('lib.net')\" $1\n",
    }
    task = Script(ScriptWorkload(command=command, folder=str(written(tmp_path, files))))
    found = {os.path.relpath(path, tmp_path) for path in command_files(task).program}
    assert found - {"run.sh", "call.sh"} == {"lib/__init__.py", "lib/net.py", "lib/part.py"}


@pytest.mark.parametrize(
    "command",
    [
        "python . {x}",
        "python -O ./ {x}",
        "python -O -c 'import __main__, helper' {x}",
        "bash -O extglob -c 'python __main__.py {x}'",
        "eval 'python __main__.py {x}'",
        "flock lock -c 'python __main__.py {x}'",
        "script -qc 'python -u __main__.py {x}' log",
        "tmux new -d 'python __main__.py {x}'",
        "watch -g 'cd . && python -m __main__ {x}'",
        "su me -c 'python __main__.py {x}'",
    ],
)
def test_a_script_in_a_word_or_a_folder_is_read(command: str, tmp_path: Path) -> None:
    written(tmp_path, {"__main__.py": "import helper", "helper.py": "", "other.py": ""})
    files = CommandFiles.of([shlex.split(command)], tmp_path)
    assert {path.name for path in files.program} == {"__main__.py", "helper.py"}


def test_paths_in_a_document_are_read(tmp_path: Path) -> None:
    written(tmp_path, {"rows/a.csv": "", "rows/b.csv": "", "train.py": ""})
    code = "from pathlib import Path\nopen(Path('rows') / 'a.csv')"
    settings = "data: rows/b.csv"
    command = (
        f"python - {{x}} <<EOF\n{code}\nEOF\npython train.py --config - <<EOF\n{settings}\nEOF"
    )
    files = command_files(Script(ScriptWorkload(command=command, folder=str(tmp_path))))
    assert {path.name for path in files.named} == {"a.csv", "b.csv"}
    assert [path.name for path in files.program] == ["train.py"]


def test_a_file_in_an_added_folder_has_one_path(tmp_path: Path) -> None:
    added = "sys.path.append(os.path.join(os.path.dirname(__file__), '..', 'lib'))"
    text = f"import os, sys\n{added}\nimport base"
    files = CommandFiles.of(
        [["python", "run/train.py"]],
        written(tmp_path, {"run/train.py": text, "lib/base.py": ""}),
    )
    assert files.program == [tmp_path / "run/train.py", tmp_path / "lib/base.py"]


def test_modules_that_import_each_other_end(tmp_path: Path) -> None:
    files = {"train.py": "import a", "a.py": "import b", "b.py": "import a, train"}
    assert found("python train.py", written(tmp_path, files))[0] == set(files)


def test_a_link_is_known_by_its_own_name(tmp_path: Path) -> None:
    written(tmp_path, {"code/model.py": "", "train.py": "import model"})
    (tmp_path / "model.py").symlink_to("code/model.py")
    assert found("python train.py", tmp_path)[0] == {"train.py", "model.py"}

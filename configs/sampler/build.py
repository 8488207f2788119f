"""Make the package carbonopt-sampler, which is `CarbonSampler` alone, without torch.

Its modules have a name of their own, so that it can be installed beside carbonopt.

    python configs/sampler/build.py FOLDER

Into FOLDER goes what `python -m build FOLDER` makes a wheel of: the modules that the sampler
imports, with `carbonopt.` in their imports replaced by `carbonopt_sampler.`, and what lies beside
this file.
"""

import ast
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAMPLER, NAME = "carbonopt.search.sampler", "carbonopt_sampler"
IMPORT = re.compile(r"^(\s*(?:from|import) )carbonopt\b", re.MULTILINE)


def source(module: str) -> Path | None:
    """Return the file of a module of carbonopt, or None for a name within a module."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file if file.is_file() else None


def imported(file: Path) -> Iterator[str]:
    """Yield the modules of carbonopt that a file imports, and the names that it takes from them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] == "carbonopt"
        ):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def closure(module: str) -> dict[str, Path]:
    """Return the files of a module, of its packages, and of all that they import from carbonopt."""
    known: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = source(name)
        if file is not None and name not in known:
            known[name] = file
            waiting += [*imported(file), *filter(None, [name.rpartition(".")[0]])]
    return known


def main(folder: Path) -> None:
    """Write the package's source into a folder that is empty or does not exist yet."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"build.py: {folder} must be an empty folder, or not be there yet.")
    for file in closure(SAMPLER).values():
        copy = folder / NAME / file.relative_to(ROOT / "carbonopt")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(
            IMPORT.sub(rf"\g<1>{NAME}", file.read_text(encoding="utf-8")), encoding="utf-8"
        )
    with (folder / NAME / "__init__.py").open("a", encoding="utf-8") as init:
        init.write(
            f"\nfrom {NAME}.search.sampler import CarbonSampler\n\n__all__ = ['CarbonSampler']\n"
        )
    (folder / NAME / "py.typed").touch()
    for beside in ("pyproject.toml", "README.md"):
        shutil.copy(HERE / beside, folder)
    shutil.copy(ROOT / "LICENSE", folder)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python configs/sampler/build.py FOLDER")
    main(Path(sys.argv[1]))

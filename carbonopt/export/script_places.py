"""The places below data/ of a script's files in the winner's folder.

The script's command finds them there.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from carbonopt.spec.study_data import InputFile
from carbonopt.train.scripts.command import Command

_MOST_LEVELS = 2  # levels above the script's folder up to which inputs keep their places


@dataclass
class ScriptPlaces:
    """The places of a script's inputs.

    Inputs in the script's folder, or near it, keep their places relative to it. Inputs elsewhere
    that the command or `workload.files` names get names of their own. The script finds all others
    by paths in its code.

    Args:
        folder: the folder in which the command runs.
        command: the script's command.
        files: the files of `workload.files`.
        noted: the inputs; files that trials wrote themselves are not needed again.
    """

    folder: PurePath
    command: str
    files: Sequence[str]
    noted: Iterable[InputFile]
    root: PurePath = field(init=False)  # the folder that data/ stands for
    inside: str = field(init=False)  # the script's folder, relative to `root`
    listed: dict[str, InputFile] = field(init=False)  # inputs by place
    elsewhere: list[InputFile] = field(init=False)
    _near: set[str] = field(init=False)  # names directly below `root`
    # places of inputs that lie far from the script's folder
    _named: dict[PurePath, str] = field(init=False)

    def __post_init__(self) -> None:
        inputs = [file for file in self.noted if not file.changed_by_trials]
        paths = [PurePath(file.path) for file in inputs]
        self.root = self._nearest_root(paths)
        self.inside = self.folder.relative_to(self.root).as_posix()
        near = [self.folder, *(path for path in paths if path.is_relative_to(self.root))]
        self._near = {path.relative_to(self.root).parts[0] for path in near if path != self.root}
        self._named = {}
        for path in (*map(PurePath, self.files), *(path for _, path in self._words(paths))):
            self._name(path)
        places = [self.place(path) for path in paths]
        placed = zip(places, inputs, strict=True)
        self.listed = {place: file for place, file in placed if place is not None}
        self.elsewhere = [file for place, file in zip(places, inputs, strict=True) if place is None]

    def _nearest_root(self, paths: Iterable[PurePath]) -> PurePath:
        """Return the folder at or above the script's that has all its inputs that lie near it."""
        root = self.folder
        for path in paths:
            common = PurePath(os.path.commonpath([self.folder, path.parent]))
            levels = len(self.folder.parts) - len(common.parts)
            if levels <= _MOST_LEVELS and common.parent != common and root.is_relative_to(common):
                root = common
        return root

    def _words(self, paths: Sequence[PurePath]) -> Iterator[tuple[str, PurePath]]:
        """Yield the words of the command, or their values, that are paths of inputs.

        A path may be that of an input or of a folder of inputs.
        """
        command = Command.of_shell(self.command)
        texts = [text for each in command.simple for text in each.documents]
        words = [word for each in command.programs for word in each.words]
        words += [word for text in texts for word in re.split(r"[\s'\"(),;]+", text)]
        for word in filter(command.literal, words):
            for text in (word, word.partition("=")[2]):
                path = PurePath(os.path.normpath(self.folder / text))
                if text and any(input_path.is_relative_to(path) for input_path in paths):
                    yield text, path

    def _name(self, path: PurePath) -> None:
        """Give a far file or folder a place of its own.

        A script gets it together with its folder, from which it imports.
        """
        far = path.parent if path.suffix == ".py" else path
        if far.is_relative_to(self.root) or any(far.is_relative_to(named) for named in self._named):
            return
        taken, number = {*self._near, *self._named.values()}, 1
        name = far.name
        while name in taken:
            number += 1
            name = f"{far.stem}-{number}{far.suffix}"
        self._named[far] = name

    def place(self, path: PurePath) -> str | None:
        """Return where an input lies below data/.

        It is None if the script finds the input by a path of its own.
        """
        if path.is_relative_to(self.root):
            return path.relative_to(self.root).as_posix()
        for far, name in self._named.items():
            if path.is_relative_to(far):
                return PurePath(name, path.relative_to(far)).as_posix()
        return None

    def placed_command(self) -> str:
        """Return the command with the new places of its files.

        Only paths that are absolute, or lead far away, are replaced.
        """
        command = self.command
        for text, path in self._words([PurePath(file.path) for file in self.listed.values()]):
            place = self.place(path)
            if place is None or not (
                PurePath(text).is_absolute() or not path.is_relative_to(self.root)
            ):
                continue
            relative = (
                os.path.relpath(place, self.inside)
                .replace("{", "{{")
                .replace("}", "}}")
                .replace("\\", r"\\")
            )
            command = re.sub(rf"(?<![\w./-]){re.escape(text)}(?![\w/-])", relative, command)
        return command

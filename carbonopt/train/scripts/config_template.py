"""A script's configuration file with placeholders; each trial gets its own copy with values."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

import yaml

from carbonopt.core.errors import BadInput
from carbonopt.core.values import Scalar
from carbonopt.train.scripts.command import Placeholder, as_text

# Placeholders are written as `{name}` or, as in Jinja, `{{ name }}`. A configuration's own braces
# stay: whatever is no arithmetic with known names.
_BRACES = re.compile(r"(?<!\$)\{\{([^{}\n]+)\}\}|(?<!\$)\{([^{}\n]+)\}")
_BARE = re.compile(r"(?:[:\[,]|^\s*-)[ \t]*\Z", re.MULTILINE)  # before a value without quotes
_WORDS_OF_YAML = ("no", "yes", "on", "off")
_MARKS_OF_TEMPLATES = (".template", ".tmpl", ".tpl", ".j2", ".jinja", ".jinja2", ".in")


@dataclass(frozen=True)
class ConfigTemplate:
    """A configuration template's text; `known` are the names that can stand in its braces."""

    name: str
    text: str
    known: frozenset[str]

    @property
    def copy_name(self) -> str:
        """The name of a trial's copy: `config` with the file's ending, apart from a template's."""
        suffixes = [
            suffix for suffix in PurePath(self.name).suffixes if suffix not in _MARKS_OF_TEMPLATES
        ]
        return "config" + (suffixes[-1] if suffixes else "")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all values that the template needs."""
        return tuple(
            dict.fromkeys(name for each in self.placeholders for name in each.expression.names)
        )

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """The placeholders in the text."""
        found = (self._placeholder(braces) for braces in _BRACES.finditer(self.text))
        return tuple(each for each in found if each is not None)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The names in braces that are kept unchanged because nothing is called so.

        A Python file's own names in braces, such as in f"{name}", are left out.
        """
        inner = ((braces[1] or braces[2]).strip() for braces in _BRACES.finditer(self.text))
        own = set[str]()
        if self.copy_name.endswith(".py"):
            own.update(re.findall(r"[^\W\d]\w*", _BRACES.sub("", self.text)))
        return tuple(
            name
            for name in dict.fromkeys(inner)
            if name.isidentifier() and name not in self.known and name not in own
        )

    def filled(self, values: Mapping[str, Scalar]) -> str:
        """Return the text with each placeholder's value. Raises BadInput."""

        def value(braces: re.Match[str]) -> str:
            placeholder = self._placeholder(braces)
            return braces[0] if placeholder is None else self._text(placeholder, values)

        return _BRACES.sub(value, self.text)

    def check(self, values: Mapping[str, Scalar]) -> None:
        """Raise BadInput if the filled text is not in the format that its name's ending says."""
        text, ending = self.filled(values), PurePath(self.copy_name).suffix.lower()
        try:
            if ending == ".json":
                json.loads(text)
            elif ending == ".toml":
                tomllib.loads(text)
            elif ending in (".yaml", ".yml"):
                self._check_words(values)
                for _ in yaml.parse(text, Loader=yaml.SafeLoader):
                    pass
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            why = " ".join(str(error).split())
            raise BadInput(
                f"workload.config_template: {self.name} with values in it is no {ending[1:]}:"
                f" {why}."
            ) from error

    def _check_words(self, values: Mapping[str, Scalar]) -> None:
        """Raise BadInput for a text without quotes that YAML reads as true or false, such as NO."""
        for braces in _BRACES.finditer(self.text):
            placeholder = self._placeholder(braces)
            if placeholder is None or not _BARE.search(self.text[: braces.start()]):
                continue
            value = placeholder.expression.value(values)
            if isinstance(value, str) and value.casefold() in _WORDS_OF_YAML:
                raise BadInput(
                    f"workload.config_template: {self.name} must have quotes around {braces[0]},"
                    f" because YAML reads {value} as a truth value; write '{braces[0]}'."
                )

    def _placeholder(self, braces: re.Match[str]) -> Placeholder | None:
        try:
            placeholder = Placeholder.parse((braces[1] or braces[2]).strip())
        except BadInput:
            return None
        names = placeholder.expression.names
        return placeholder if names and self.known.issuperset(names) else None

    def _text(self, placeholder: Placeholder, values: Mapping[str, Scalar]) -> str:
        if placeholder.form:
            return placeholder.text(values)
        value = placeholder.expression.value(values)
        if isinstance(value, bool):
            return str(value) if self.copy_name.endswith(".py") else as_text(value)
        # YAML 1.1 reads 1e-05 as a text; with a dot all formats read it as a number.
        return (
            re.sub(r"^(-?[0-9]+)e", r"\1.0e", str(value))
            if isinstance(value, float)
            else str(value)
        )

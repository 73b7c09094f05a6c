"""Options of commands: declared as fields of a dataclass, read from words, shown as help.

A command is a dataclass whose fields are made by `option`, `flag`, `words` and `positional`, with
its `examples` and, where more may be missing than the fields say, `also_missing`. `read_words`
makes one of the words of a command line and reports every mistake in them at once. All of this
takes milliseconds: what a command needs of JAX it imports when it runs.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from meshwright._text import text_width
from meshwright.errors import MeshwrightError, short

PROGRAM = "meshwright"
_NUMBER = re.compile(r"-[\d.]")  # no option, though it begins as one
_NARROWEST, _WIDEST = 40, 100  # columns of help


class UsageError(MeshwrightError):
    """Words that a command cannot read; the text has every mistake, misspelt options first."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a command: how its words are read, and what the help says of it.

    `kind` is "value" (`--on NAME`), "flag" (`--json`), "words" (`--set A B`) or "positional".
    `choices` are all values that there are; `suggested` those that a shell completes. `ending` is
    that of a file's name.
    """

    help: str
    read: Callable[[str], Any]
    kind: Literal["value", "flag", "words", "positional"]
    metavar: str
    choices: tuple[str, ...] = ()
    suggested: tuple[str, ...] = ()
    name: str = ""
    default: Any = None
    required: bool = False
    ending: str = ""

    @property
    def written(self) -> str:
        """The option as it is typed: `--no-cache` where only the denial changes anything."""
        if self.kind == "positional":
            return self.metavar
        denied = "no-" if self.kind == "flag" and self.default else ""
        return f"--{denied}{self.name.rstrip('_').replace('_', '-')}"

    def spellings(self) -> dict[str, Any]:
        """Every way to write it, with the value of a flag so written."""
        plain = f"--{self.name.rstrip('_').replace('_', '-')}"
        if self.kind == "flag":
            return {self.written: not self.default, plain: True, f"--no-{plain[2:]}": False}
        return {plain: None}


_NAMES: dict[Any, str] = {int: "N", float: "NUMBER", str: "TEXT"}


def option(
    help: str,
    read: Callable[[str], Any] = str,
    *,
    default: Any = None,
    metavar: str = "",
    choices: Sequence[str] = (),
    suggested: Sequence[str] = (),
    required: bool = False,
    ending: str = "",
) -> Any:
    """Declare `--name VALUE`; `read` makes the value of its word."""
    metavar = metavar or "|".join(choices) or _NAMES.get(read, f"FILE{ending}")
    made = Option(help, read, "value", metavar, tuple(choices), tuple(suggested), ending=ending)
    return _field(made, default, required)


def flag(help: str, *, default: bool = False) -> Any:
    """Declare `--name`, or `--no-name` for what is done by default."""
    return _field(Option(help, bool, "flag", ""), default, False)


def words(help: str, *, metavar: str) -> Any:
    """Declare `--name WORD WORD ...`, which may be there several times."""
    return _field(Option(help, str, "words", metavar), (), False)


def positional(
    help: str,
    *,
    metavar: str,
    required: bool = True,
    choices: Sequence[str] = (),
    suggested: Sequence[str] = (),
) -> Any:
    """Declare a word without a name, in the order of the fields."""
    made = Option(help, str, "positional", metavar, tuple(choices), tuple(suggested or choices))
    return _field(made, None, required)


def _field(made: Option, default: Any, required: bool) -> Any:
    made = dataclasses.replace(made, default=default, required=required)
    if required:
        return dataclasses.field(metadata={"option": made})
    return dataclasses.field(default=default, metadata={"option": made})


class Command:
    """Base of commands: a name, two examples, and what is done."""

    command: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]

    @classmethod
    def also_missing(cls, values: Mapping[str, Any]) -> list[str]:
        """Fields that are required by what other fields hold."""
        return []

    def run(self) -> int | None:
        """Do it; returns the exit code, `None` for 0."""
        raise NotImplementedError  # pragma: no cover


def options_of(command: type[Command]) -> list[Option]:
    """List the options of a command, in the order of its fields."""
    fields = dataclasses.fields(command)  # type: ignore[arg-type]
    return [dataclasses.replace(each.metadata["option"], name=each.name) for each in fields]


# Reading. In: the words after a command's name. Out: the command. Mistakes are collected, so that
# they are told together: misspelt options first, since they are why others seem to be missing.


def read_words(command: type[Command], given: Sequence[str]) -> Command:
    """Make a command of its words; raises `UsageError` with everything that is wrong in them."""
    reading = _Reading(command)
    reading.read(list(given))
    return command(**reading.finished())


class _Reading:
    def __init__(self, command: type[Command]):
        self.command = command
        self.options = options_of(command)
        self.by_spelling = {
            spelling: (each, value)
            for each in self.options
            if each.kind != "positional"
            for spelling, value in each.spellings().items()
        }
        self.values: dict[str, Any] = {}
        self.typos: list[str] = []
        self.wrong: list[str] = []
        self.meant: set[str] = set()  # options that a typo stands for

    def read(self, left: list[str]) -> None:
        slots = [each for each in self.options if each.kind == "positional"]
        while left:
            word = left.pop(0)
            if word == "--":
                for plain in left:
                    self._take(plain, slots)
                return
            if _is_option(word):
                self._named(word, left)
            else:
                self._take(word, slots)

    def _take(self, word: str, slots: list[Option]) -> None:
        if slots:
            self._read_value(slots.pop(0), word)
        elif not self.typos:  # else it may be the value of what was misspelt
            self.wrong.append(
                f"{self.command.command} takes no {short(word)}: it is one word more."
            )

    def _named(self, word: str, left: list[str]) -> None:
        spelling, equals, value = word.partition("=")
        spelling = "--" + spelling.lstrip("-").replace("_", "-")
        if spelling not in self.by_spelling or not word.startswith("--"):
            self._misspelt(word.partition("=")[0], spelling, bool(equals), left)
            return
        each, of_flag = self.by_spelling[spelling]
        if each.kind == "flag":
            self.values[each.name] = of_flag
            if equals:
                self.wrong.append(f"{spelling} takes no value.")
        elif each.kind == "words":
            several = [value] if equals else []
            while not equals and left and not _is_option(left[0]):
                several.append(left.pop(0))
            if not several:
                self.wrong.append(f"{spelling} has no value: {_sentence(each)}")
            self.values[each.name] = (*self.values.get(each.name, ()), *several)
        elif equals or (left and not left[0].startswith("--")):
            self._read_value(each, value if equals else left.pop(0))
        else:
            self.meant.add(each.name)
            self.wrong.append(f"{spelling} has no value: {_sentence(each)}")

    def _misspelt(self, written: str, spelling: str, has_value: bool, left: list[str]) -> None:
        close = difflib.get_close_matches(spelling, self.by_spelling, n=1, cutoff=0.6)
        hint = f" Did you mean {close[0]}?" if close else ""
        self.typos.append(f"{self.command.command} has no option {written}.{hint}")
        if close:
            each, _ = self.by_spelling[close[0]]
            self.meant.add(each.name)
            if each.kind != "flag" and not has_value and left and not _is_option(left[0]):
                left.pop(0)

    def _read_value(self, each: Option, word: str) -> None:
        try:
            self.values[each.name] = each.read(word)
        except ValueError:
            self.meant.add(each.name)
            kind = "an integer" if each.read is int else "a number"
            self.wrong.append(f"{each.written}: {short(word)} is not {kind}.")
        if each.choices and word not in each.choices:
            known = ", ".join(each.choices)
            self.wrong.append(f"{each.written}: {short(word)} is not one of {known}. {each.help}")
        path = Path(word)
        if each.ending and path.suffix.lower() != each.ending:
            path = path if path.name else path / "file"
            self.wrong.append(
                f"{each.written}: {short(word)} does not end in {each.ending}. Write "
                f"{each.written} {path.with_suffix(each.ending)}."
            )

    def finished(self) -> dict[str, Any]:
        also = self.command.also_missing(self.values)
        missing = [
            f"{each.written} is missing: {_sentence(each)}"
            for each in self.options
            if (each.required or each.name in also)
            and each.name not in self.values
            and each.name not in self.meant
        ]
        mistakes = [*self.typos, *self.wrong, *missing]
        if not mistakes:
            return self.values
        more = f"See {PROGRAM} {self.command.command} --help."
        if len(mistakes) == 1:
            raise UsageError(f"{mistakes[0]} {more}")
        raise UsageError("\n  ".join([*mistakes, more]))


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.match(word)


def _sentence(each: Option) -> str:
    """The first sentence of the help, to follow a colon."""
    first = re.split(r"(?<=\.) (?=[A-Z])", each.help)[0]
    return first if first[:2].isupper() else first[:1].lower() + first[1:]


# Help. The screen's width decides where lines are broken.


def help_text(command: type[Command]) -> str:
    """The help of a command: what it does, its options with their defaults, examples."""
    options = options_of(command)
    places = [each for each in options if each.kind == "positional"]
    named = [each for each in options if each.kind != "positional"]
    needed = [f"{each.written} {each.metavar}" for each in named if each.required]
    slots = [each.metavar if each.required else f"[{each.metavar}]" for each in places]
    usage = " ".join([f"usage: {PROGRAM} {command.command}", *slots, *needed, "[options]"])
    rows = [(each.metavar, each.help) for each in places]
    rows += [(f"{each.written} {each.metavar}".rstrip(), _described(each)) for each in named]
    rows.append(("-h, --help", "Show this."))
    paragraphs = (command.__doc__ or "").split("\n\n")
    said = [textwrap.fill(" ".join(part.split()), _width()) for part in paragraphs]
    examples = "\n".join(["examples", *(f"  {line}" for line in command.examples)])
    return "\n\n".join([usage, *said, _rows(rows), examples])


def overview(commands: Mapping[str, type[Command]], about: str) -> str:
    """The help of the program: a line for each command."""
    rows = [(name, _summary(command)) for name, command in commands.items()]
    return "\n\n".join(
        [
            f"usage: {PROGRAM} COMMAND ... | --help | --version",
            textwrap.fill(about, _width()),
            _rows(rows),
            f"{PROGRAM} COMMAND --help has the options of a command.",
            f'examples\n  {PROGRAM} mesh "fsdp:-1, tp:4" --on v5e:16x16\n'
            f"  {PROGRAM} rehearse --help",
        ]
    )


def _summary(command: type[Command]) -> str:
    """The first sentence of a command's docstring, as a line of a list."""
    return (
        re.split(r"[.:;] |\.\s*$", " ".join((command.__doc__ or "").split()))[0].rstrip(".") + "."
    )


def _described(each: Option) -> str:
    if each.required:
        return f"{each.help} Required."
    if each.kind == "value" and each.default is not None:
        default = f"{each.default:g}" if isinstance(each.default, float) else each.default
        return f"{each.help} Default: {default}."
    return each.help


def _width() -> int:
    return max(_NARROWEST, min(_WIDEST, text_width()))


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    """Names on the left, text on the right, or below where the screen is narrow."""
    width = _width()
    column = min(max(len(name) for name, _ in rows), width // 3) + 4
    lines = []
    for name, text in rows:
        indent = " " * column
        filled = textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
        start = f"  {name}"
        fits = len(start) + 2 <= column
        lines.append(start + filled[len(start) :] if fits else f"{start}\n{filled}")
    return "\n".join(lines)


# Completion. In: the commands. Out: a script for a shell to read at its start.


def completion(commands: Mapping[str, type[Command]], shell: str) -> str:
    """Write the script that completes commands, options and known values in a shell."""
    if shell == "fish":
        return _fish(commands)
    script = _BASH.format(commands=" ".join(commands), cases=_bash_cases(commands))
    if shell == "zsh":
        return f"{_ZSH}\n{script}"
    return script


# zsh reads bash's scripts once its own completion is loaded.
_ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
autoload -Uz bashcompinit && bashcompinit"""


_BASH = """\
_meshwright() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" known=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    known="{commands} --help --version"
  else
    case "${{COMP_WORDS[1]}} $before" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$known" -- "$word"))
}}
complete -o default -F _meshwright meshwright"""


def _bash_cases(commands: Mapping[str, type[Command]]) -> str:
    lines = []
    for name, command in commands.items():
        options = options_of(command)
        for each in options:
            values = each.choices or each.suggested
            if each.kind == "value":
                lines.append(f'      "{name} {each.written}") known="{" ".join(values)}" ;;')
        plain = [each.written for each in options if each.kind != "positional"]
        plain += [
            value for each in options if each.kind == "positional" for value in each.suggested
        ]
        lines.append(f'      "{name} "*) known="{" ".join([*plain, "--help"])}" ;;')
    return "\n".join(lines)


def _fish(commands: Mapping[str, type[Command]]) -> str:
    first = "complete -c meshwright -f -n __fish_use_subcommand"
    lines = [f"{first} -l help", f"{first} -l version"]
    for name, command in commands.items():
        lines.append(f"{first} -a {name} {_fish_words('-d', _summary(command))}")
        within = f"complete -c meshwright -n '__fish_seen_subcommand_from {name}'"
        options = options_of(command)
        if not any(each.kind == "positional" and "FILE" in each.metavar for each in options):
            lines.append(f"{within} -f")  # else fish completes files, too
        for each in options:
            values = " ".join(each.choices or each.suggested)
            given = f" {_fish_words('-a', values)}" if values else ""
            if each.kind == "positional":
                lines += [f"{within}{given}"] if given else []
            else:
                takes = "" if each.kind == "flag" else " -r" if "FILE" in each.metavar else " -x"
                about = _fish_words("-d", re.split(r"(?<=\.) ", each.help)[0])
                lines.append(f"{within} -l {each.written[2:]}{takes}{given} {about}")
        lines.append(f"{within} -l help")
    return "\n".join(lines)


def _fish_words(option: str, words: str) -> str:
    quoted = words.replace("\\", "\\\\").replace("'", "\\'")
    return f"{option} '{quoted}'"

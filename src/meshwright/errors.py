"""Every error and warning of the library, and the helpers that keep messages short."""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import json
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator

LONGEST_MESSAGE = 1500
_PACKAGE = __name__.partition(".")[0] + "."


class MeshwrightError(ValueError):
    """Base of all errors raised here. Says where, what sizes, and the fix.

    `option` is the keyword argument that the message speaks of, if it speaks of one: the command
    line, whose options have other names, reads it there instead of in the text.

    >>> import meshwright as mw
    >>> mw.MeshSpec.parse("dp:0")
    Traceback (most recent call last):
    ...
    meshwright.errors.SpecError: axis 'dp': size 0 is not allowed. Use a positive integer, or -1...
    """

    def __init__(self, message: str, *, option: str | None = None):
        if len(message) > LONGEST_MESSAGE:
            message = message[: LONGEST_MESSAGE - 4] + " ..."
        super().__init__(message)
        self.option = option


class SpecError(MeshwrightError):
    """The request itself is wrong: its text, names, sizes or types."""


class TopologyError(MeshwrightError):
    """The hardware is unknown, impossible, or its devices do not belong together."""


class PlacementError(MeshwrightError):
    """The request and the hardware do not fit each other."""


class MeshError(MeshwrightError):
    """A mesh cannot be built, viewed or compared as asked."""


class BackendError(MeshError, RuntimeError):
    """JAX has no such backend here. Also a `RuntimeError`, as the one that JAX raises."""


class PartitionError(MeshwrightError):
    """A tree, its specs and a mesh do not fit; the text names every leaf that is wrong."""


class CheckpointError(PartitionError):
    """A checkpoint on the disk is not there, or damaged; another one may be whole."""


class GroupError(MeshwrightError):
    """Groups, or arrays that live in some of them, do not fit together or are not where asked."""


class TransferError(MeshwrightError):
    """An array cannot be moved between groups as asked."""


class ScheduleError(MeshwrightError):
    """A schedule is not defined for these sizes, or is broken; the text names the task."""


class PipelineError(MeshwrightError):
    """A function cannot be cut into stages or run by these groups; the text names the place."""


class RehearsalError(MeshwrightError):
    """A step that cannot be rehearsed, or a compile that failed."""


class CalibrationError(MeshwrightError):
    """A step or a machine that cannot be measured, or a file of speeds that is not one."""


class PlanningError(MeshwrightError):
    """A step that cannot be planned for: nothing to shard, nothing that fits, a bad option."""


class ModelError(MeshwrightError):
    """A model, its settings or its batch are unknown or do not fit together."""


class IdleDevicesWarning(UserWarning):
    """A mesh uses a part of the devices; the text says which part stays idle."""


class AxisNameWarning(UserWarning):
    """An axis has a name of its own that is one slip from a known one, e.g. `fdsp` for `fsdp`."""


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over; the text says why."""


class MeshOrderWarning(UserWarning):
    """Two meshes hold the same devices in a different order."""


class PlanChangedWarning(UserWarning):
    """A saved plan is used for another program or hardware; the text says what differs."""


class RecompilationWarning(UserWarning):
    """A pipeline is compiled again and again; the text says which argument differs each time."""


def warn(message: str, category: type[Warning]) -> None:
    """Warn, pointing at the nearest line up the stack that is not of this package."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


__all__ = sorted(
    name
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, (MeshwrightError, UserWarning))
)


def __dir__() -> list[str]:
    return __all__


# Whether messages write options as flags: set while a command of the command line runs.
_FLAGS: contextvars.ContextVar[bool] = contextvars.ContextVar("_FLAGS", default=False)


@contextlib.contextmanager
def options_as_flags() -> Iterator[None]:
    """Write options in messages as flags of the command line inside of the block."""
    token = _FLAGS.set(True)
    try:
        yield
    finally:
        _FLAGS.reset(token)


def on_command_line() -> bool:
    """Whether a command of the command line runs."""
    return _FLAGS.get()


def option_text(name: str, *values: str) -> str:
    """Write an option, and values it may have, in the way the reader of the message writes it.

    >>> option_text("unmatched", "replicate", "shape")
    "unmatched='replicate' or 'shape'"
    >>> with options_as_flags():
    ...     option_text("unmatched", "replicate", "shape"), option_text("min_shard_bytes")
    ('--unmatched replicate or shape', '--min-shard-bytes')
    """
    if _FLAGS.get():
        words = " or ".join(map(shlex.quote, values))
        return f"--{name.replace('_', '-')} {words}".rstrip()
    return f"{name}={' or '.join(map(repr, values))}" if values else name


def setting_text(model: str, setting: str, value: object) -> str:
    """Write a model with another setting in the way the reader of the message writes it.

    >>> setting_text("tiny", "seq", 128)
    "model('tiny', seq=128)"
    """
    if _FLAGS.get():
        return f"--set {setting}={value}"
    return f"model({model!r}, {setting}={value!r})"


def literal_text(value: object) -> str:
    """Write a value as a Python literal, or as JSON, which files for the command line are in.

    >>> literal_text(("**", None))
    "('**', None)"
    >>> with options_as_flags():
    ...     literal_text(("**", None))
    '["**", null]'
    """
    return json.dumps(value) if _FLAGS.get() else repr(value)


def short(value: object, limit: int = 60) -> str:
    """Return `repr(value)`, cut so that no message grows with its input.

    >>> short("x" * 100, limit=12)
    "'xxxxxxx ..."
    """
    try:
        if isinstance(value, (str, bytes)) and len(value) > limit:
            value = value[:limit]
            return repr(value)[: limit - 4] + " ..."
        text = repr(value)
    except Exception as error:  # a hostile __repr__ must not hide the real message
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def near(word: str, known: Iterable[str]) -> str:
    """Return a `Did you mean ...?` for a misspelt word, or nothing.

    >>> near("v5pp", ["v5p", "v4"])
    " Did you mean 'v5p'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def listing(words: Iterable[object], limit: int = 8) -> str:
    """Return a comma-separated list that says how many it left out.

    >>> listing(range(20), limit=3)
    '0, 1, 2 and 17 more'
    """
    items = [str(word) for word in words]
    if len(items) <= limit:
        return ", ".join(items)
    return f"{', '.join(items[:limit])} and {len(items) - limit} more"

"""A `Rehearsal` as text for the terminal, as JSON, as a notebook's block, and as a web page.

`html_sections` draws what the last two show. A page also has what it takes to repeat it, its own
data as JSON, and a script that sorts and filters tables; it fetches nothing and works without.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright._html import Html, block, join, style, tag
from meshwright._html import page as html_page
from meshwright._text import plural_noun
from meshwright._version import __version__
from meshwright.rehearsal.advice import find_advice
from meshwright.rehearsal.callbacks import callbacks_line
from meshwright.rehearsal.host_memory import host_notes
from meshwright.rehearsal.html_sections import section, sections, verdict
from meshwright.rehearsal.memory import CPU_ESTIMATE
from meshwright.rehearsal.model_commands import rehearse_command

if TYPE_CHECKING:  # `result` imports this file, and a `Rehearsal` prints itself with it
    from meshwright.rehearsal.avoidable_costs import AvoidableCosts
    from meshwright.rehearsal.remedy_table import Remedy
    from meshwright.rehearsal.result import Rehearsal


def as_text(
    result: Rehearsal, remedies: Sequence[Remedy] = (), costs: AvoidableCosts | None = None
) -> str:
    """Print everything for a terminal; `remedies` and `costs` are those that were tried, if any."""
    parts = [headline(result), str(result.memory)]
    if result.time is not None:
        parts += [str(result.collectives), f"{result.time}\n{throughput_line(result)}"]
    if costs := costs or result.costs():
        parts.append(str(costs))
    parts += [str(each) for each in (result.host_transfers, result.host_memory) if each is not None]
    parts.append(str(find_advice(result, remedies, costs)))
    return "\n\n".join(parts)


def headline(result: Rehearsal) -> str:
    """Say what was compiled, for what, by which compiler."""
    placed = result.placement
    how = "cached, compiled" if result.from_cache else f"compiled in {result.compile_seconds:.1f} s"
    devices = placed.topology.num_devices
    lines = [
        f"{result.name} as {placed.spec} on {placed.topology.name} "
        f"({devices} {plural_noun(devices, 'device')}), {how} by {result.compiler}"
    ]
    if result.stand_in:
        lines.append(
            f"{CPU_ESTIMATE}: compiled for simulated CPU devices in place of "
            f"{placed.topology.chip.name}. The partitioning is real, memory and fusion are the "
            "CPU's."
        )
    if result.callbacks:
        lines.append(callbacks_line(result.callbacks))
    lines += host_notes(result)
    return "\n".join(lines)


def throughput_line(result: Rehearsal) -> str:
    """Tokens or examples in a second, and the two utilisations."""
    words = [f"MFU {result.mfu or 0:.0%} (model FLOPs, remat not counted)"]
    if result.time is not None:
        words.append(f"hardware utilisation {result.time.hardware_utilisation:.0%}")
    if result.tokens_per_second is not None:
        words.insert(0, f"{result.tokens_per_second:,.0f} tokens a second")
    elif result.examples_per_second is not None:
        words.insert(0, f"{result.examples_per_second:,.4g} examples a second")
    return ", ".join(words)


def as_json(result: Rehearsal) -> dict[str, Any]:
    """Everything but the HLO text as plain data."""
    return {
        "name": result.name,
        "mesh": str(result.placement.spec),
        "on": result.placement.topology.name,
        "devices": result.placement.topology.num_devices,
        "compiler": result.compiler,
        "stand_in": result.stand_in,
        "cpu_estimate": result.stand_in,
        "compile_seconds": result.compile_seconds,
        "from_cache": result.from_cache,
        "speeds": result.placement.topology.chip.whose_speeds(
            result.placement.topology.num_devices
        ),
        "fits": result.fits,
        "memory": result.memory.to_json(),
        "collectives": None if result.time is None else result.collectives.to_json(),
        "time": None if result.time is None else result.time.to_json(),
        "tokens_per_second": result.tokens_per_second,
        "examples_per_second": result.examples_per_second,
        "mfu": result.mfu,
        "arguments": result.arguments.to_json(),
        "costs": result.costs().to_json(),
        "host_memory": result.host_memory and result.host_memory.to_json(),
        "host_transfers": result.host_transfers and result.host_transfers.to_json(),
        "offload_lost": result.offload_lost,
        "callbacks": [callback.to_json() for callback in result.callbacks],
        "remedies": None if result.memory.fits else result.remedies().to_json(),
        "advice": result.advice().to_json(),
    }


def as_html(result: Rehearsal) -> str:
    """Draw everything as one self-contained block: no scripts, nothing fetched."""
    advice = result.advice().drawing()
    parts = [
        verdict(result, headline(result).splitlines()),
        section("next", "What to do next", advice, result.stand_in),
    ]
    parts += [section(name, *content) for name, content in sections(result).items()]
    return block(*parts)


# Around the style sheet of every picture: what only a whole page has. `color-scheme` lets the
# browser paint its own background dark, too.
_FRAME = """\
:root{color-scheme:light dark}
body{margin:0}
.mw.page{min-height:100vh}
.mw.page>main,.mw.page>nav,.mw.page>footer{max-width:1080px;margin:0 auto;padding:0 20px}
.mw.page>main{padding-top:28px}
.mw.page>footer{color:var(--soft);font-size:13px;padding-top:20px;padding-bottom:40px}
.mw.page>nav{border-bottom:1px solid var(--line);max-width:none;padding:9px 20px;font-size:14px}
.mw.page>nav div{max-width:1040px;margin:0 auto;display:flex;flex-wrap:wrap;gap:2px 18px}
.mw.page>nav b{margin-right:6px}
"""


def as_page(
    result: Rehearsal,
    *,
    remedies: Sequence[Remedy] = (),
    costs: AvoidableCosts | None = None,
    more: Mapping[str, tuple[str, Html]] | None = None,
    title: str | None = None,
) -> str:
    """Make one page; `more` are sections beside those that every rehearsal has."""
    advice = find_advice(result, remedies, costs).drawing()
    origin = provenance(result)
    parts = {  # heading and content, by the name that links use
        **sections(result, remedies, costs),
        **(more or {}),
        "repeat": ("To repeat this", _repeat(result, origin)),
    }
    first = section("next", "What to do next", advice, result.stand_in)
    body = join([first, *(section(name, *content) for name, content in parts.items())])
    title = title or f"{result.name} on {result.placement.topology.name}"
    links = (tag("a", name, href=f"#{name}") for name in ("next", *parts))
    made_by = f"Made by meshwright {__version__}. Nothing on this page is fetched."
    data = {**as_json(result), "provenance": origin}
    inside = join(
        [
            tag("nav", tag("div", tag("b", title), *links), aria_label="Sections"),
            tag("main", verdict(result, headline(result).splitlines()), body),
            tag("footer", made_by),
            tag("script", _inert(data), type="application/json", id="meshwright-data"),
            tag("script", Html(_script())),
        ]
    )
    return html_page(title, inside, css=style() + _FRAME, body_class="mw page")


def _inert(data: Any) -> Html:
    """JSON that no text in it can end the element of, or be read as markup."""
    text = json.dumps(data, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Html(text)


@functools.cache
def _script() -> str:
    return resources.files("meshwright").joinpath("_page.js").read_text(encoding="utf-8")


# What it takes to repeat a rehearsal.


def provenance(result: Rehearsal) -> dict[str, str]:
    """Date, versions, the command and the revision of the code; empty where one is not known."""
    libraries = ("jax", "jaxlib", "libtpu")
    versions = [f"meshwright {__version__}", *filter(None, map(_version, libraries))]
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": now.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "compiler": result.compiler,
        "command": rehearse_command(result.request) or _started_by(),
        "revision": _revision(result.request.function),
    }


def _version(library: str) -> str:
    try:
        return f"{library} {metadata.version(library)}"
    except metadata.PackageNotFoundError:
        return ""


def _started_by() -> str:
    """The command line, if it is ours, else the script's name alone.

    Flags of a user's script may be secrets, and pages are passed on. Of a notebook's kernel there
    is nothing to repeat.
    """
    if any("ipykernel" in word for word in sys.orig_argv) or sys.argv[:1] in ([], [""], ["-c"]):
        return ""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec is not None else ""
    name = Path(sys.argv[0]).name
    if "meshwright" in (name, module):
        return shlex.join(["meshwright", *sys.argv[1:]])
    return f"python -m {module}" if module else f"python {name}" if name.endswith(".py") else name


def _revision(function: Callable[..., Any]) -> str:
    """The commit of the file that the step is written in, where that is in a repository of git."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # written in no file: a partial, a callable object
        return ""
    if not file or _git(file, "ls-files", "--error-unmatch", Path(file).name) is None:
        return ""
    commit = _git(file, "rev-parse", "HEAD")
    changed = _git(file, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}, with changes that are not committed" if changed else commit or ""


def _git(file: str, *words: str) -> str | None:
    """What git says in the folder of a file; `None` where it is not there or says no."""
    command = ["git", "-C", str(Path(file).parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _repeat(result: Rehearsal, origin: Mapping[str, str]) -> Html:
    """The origin of the numbers, and a link to them, which the page's script fills."""
    written = (
        (tag("dt", name), tag("dd", tag("code", words))) for name, words in origin.items() if words
    )
    name = f"{result.name}.json".replace("/", "-")
    words = "Download these numbers as JSON"
    link = tag("a", words, id="meshwright-download", download=name, hidden="")
    return join([tag("dl", *(part for pair in written for part in pair), class_="repeat"), link])

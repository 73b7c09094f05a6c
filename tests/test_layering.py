"""Data flows one way: a room imports only rooms above it, and private JAX has one door."""

import ast
import collections
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import meshwright as mw

# Top to bottom.
ROOMS = (
    "axes",
    "spec",
    "hardware",
    "placement",
    "meshes",
    "trees",
    "schedules",
    "partitioning",
    "transfers",
    "interfaces",
    "checkpoints",
    "mpmd",
    "watchdog",
    "pipelines",
    "models",
    "hlo",
    "rehearsal",
    "calibration",
    "planning",
    "report",
    "cli",
)
# What every room may use, top to bottom too.
LEAVES = (
    "errors",
    "_version",
    "_lazy",
    "_compat",
    "_compat_lowering",
    "_checks",
    "_text",
    "_html",
    "_show",
    "_progress",
    "_processes",
)
# The package's own front door and `python -m meshwright` see everything.
FRONT = ("__init__", "__main__")
PRIVATE = ("jax._src", "jax.experimental", "jax.extend", "jax.interpreters")

SOURCE = Path(mw.__file__).parent
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def room_of(path: str) -> str:
    """The room, leaf or front file a path inside the package belongs to."""
    return path.split("/")[0].removesuffix(".py")


def imported_modules(source: str, path: str) -> set[str]:
    """Absolute names of everything a file imports, wherever in the file it does so."""
    package = ["meshwright", *path.split("/")[:-1]]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def layering_faults(source: str, path: str) -> list[str]:
    """What a file imports that it must not."""
    here = room_of(path)
    if here in FRONT:
        return []
    faults = []
    for module in sorted(imported_modules(source, path)):
        top, _, rest = module.partition(".")
        if top != "meshwright":
            continue
        there = rest.split(".")[0]
        if there == here:
            allowed = True
        elif there in LEAVES:
            allowed = here in ROOMS or LEAVES.index(there) < LEAVES.index(here)
        elif there in ROOMS:
            allowed = here in ROOMS and ROOMS.index(there) < ROOMS.index(here)
        else:  # the front door, which leads to every room
            allowed = here == "cli"
        if not allowed:
            faults.append(f"{path} imports {module}")
    return faults


def private_faults(source: str, path: str) -> list[str]:
    """Private or experimental JAX, imported, reached by attribute, or named for importlib."""
    if path in ("_compat.py", "_compat_lowering.py"):
        return []
    tree = ast.parse(source)
    names = imported_modules(source, path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"[\w.]+", node.value):
                names.add(node.value)
    return sorted(
        f"{path} uses {name}"
        for name in names
        if any(name == door or name.startswith(f"{door}.") for door in PRIVATE)
    )


@pytest.mark.parametrize("path", FILES)
def test_file_imports_only_rooms_above_it(path):
    assert layering_faults((SOURCE / path).read_text(), path) == []


@pytest.mark.parametrize("path", FILES)
def test_private_jax_stays_behind_compat(path):
    assert private_faults((SOURCE / path).read_text(), path) == []


# Names that tell what a file is in its room, whichever that is.
SHARED_BASENAMES = ("__init__", "__main__", "api", "types", "named", "report")
MOST_FILES = 187  # of all rooms but these, which have a limit of their own
MOST_FILES_OF = {"calibration": 13, "planning": 42}
MOST_INNER_IMPORTS = 20  # of our own modules, inside of functions
SHORT_FILE = 60


def basename_faults(paths: Iterable[str]) -> dict[str, list[str]]:
    """Files that "go to file" cannot tell apart, by their basename."""
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(path.rpartition("/")[2].removesuffix(".py"), []).append(path)
    return {
        name: sorted(same)
        for name, same in by_name.items()
        if len(same) > 1 and name not in SHARED_BASENAMES
    }


def importers(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """For every file of the package, the files that import it or something from it."""
    modules = {
        "meshwright." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path
        for path in sources
    }
    using: dict[str, set[str]] = {path: set() for path in sources}
    for path, source in sources.items():
        for name in imported_modules(source, path):
            # `from a.b import c`: c is a module, or a name in the module a.b.
            there = modules.get(name) or modules.get(name.rpartition(".")[0])
            if there is not None and there != path:
                using[there].add(path)
    return using


def short_file_faults(sources: Mapping[str, str]) -> list[str]:
    """Files so short, and used by one other file alone, that they are a paragraph of that file."""
    using = importers(sources)
    return sorted(
        path
        for path, source in sources.items()
        if not path.endswith("__init__.py")
        and len(source.splitlines()) < SHORT_FILE
        and len(using[path]) == 1
    )


def test_there_are_few_files():
    rooms = collections.Counter(map(room_of, FILES))
    assert all(rooms[room] <= most for room, most in MOST_FILES_OF.items())
    assert len(FILES) - sum(rooms[room] for room in MOST_FILES_OF) <= MOST_FILES


def test_no_two_files_share_a_basename():
    assert basename_faults(FILES) == {}


def inner_imports(source: str) -> list[int]:
    """The lines inside of functions that import modules of the package."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = [node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    return sorted(
        {
            node.lineno
            for function in inside
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom) and "meshwright" in ast.unparse(node)
        }
    )


def test_few_modules_are_imported_inside_of_functions():
    lines = {path: inner_imports((SOURCE / path).read_text()) for path in FILES}
    assert sum(map(len, lines.values())) <= MOST_INNER_IMPORTS, lines
    source = "import meshwright.a\ndef f():\n    from meshwright.b import c\n    import os\n"
    assert inner_imports(source) == [3]


def test_no_short_file_serves_a_single_other_file():
    assert short_file_faults({path: (SOURCE / path).read_text() for path in FILES}) == []


def test_check_sees_a_basename_that_is_used_twice():
    paths = ["a/types.py", "b/types.py", "a/reading.py", "b/reading.py", "a/__init__.py"]
    assert basename_faults(paths) == {"reading": ["a/reading.py", "b/reading.py"]}


def test_check_sees_a_short_file_with_one_importer():
    sources = {
        "a/__init__.py": "",
        "a/one.py": "x = 1\n",
        "a/two.py": "from meshwright.a.one import x\n" * SHORT_FILE,
        "b/three.py": "from meshwright.a import two\n",
        "b/four.py": "from meshwright.a.two import x\nfrom meshwright.b.three import two\n",
        "b/five.py": "import meshwright.b.three\n",
    }
    assert short_file_faults(sources) == ["a/one.py"]


def test_every_file_belongs_to_a_known_room():
    assert {room_of(path) for path in FILES} <= {*ROOMS, *LEAVES, *FRONT}


def test_every_room_says_what_it_is_for():
    missing = [
        path
        for path in FILES
        if path.endswith("/__init__.py")
        and not ast.get_docstring(ast.parse((SOURCE / path).read_text()))
    ]
    assert missing == []


def test_no_room_or_module_hides_a_public_name():
    assert {room_of(path) for path in FILES} & set(mw.__all__) == set()
    assert set(ROOMS) & set(mw.__all__) == set()


@pytest.mark.parametrize(
    ("source", "path", "fault"),
    [
        ("import meshwright.meshes", "spec/a.py", "meshwright.meshes"),
        ("from meshwright.placement import place", "hardware/a.py", "meshwright.placement.place"),
        ("from meshwright import meshes", "placement/a.py", "meshwright.meshes"),
        ("from meshwright import place", "axes/a.py", "meshwright.place"),
        ("import meshwright", "axes/a.py", "meshwright"),
        ("from ..meshes import build", "spec/a.py", "meshwright.meshes.build"),
        ("from . import spec", "errors.py", "meshwright.spec"),
        ("def f():\n    from meshwright.cli import main", "report/a.py", "meshwright.cli.main"),
        ("from meshwright.spec import MeshSpec", "_text.py", "meshwright.spec.MeshSpec"),
        ("from meshwright import _compat", "errors.py", "meshwright._compat"),
    ],
)
def test_check_sees_an_import_of_a_room_below(source, path, fault):
    assert layering_faults(source, path) == [f"{path} imports {fault}"]


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("from meshwright.spec import MeshSpec", "hardware/a.py"),
        ("from meshwright import _compat", "meshes/a.py"),
        ("from meshwright.errors import SpecError", "axes/a.py"),
        ("from meshwright.axes import role", "cli/a.py"),
        ("from .other import thing", "spec/a.py"),
        ("from meshwright.cli import main", "__main__.py"),
        ("import numpy", "axes/a.py"),
    ],
)
def test_check_lets_an_import_of_a_room_above_pass(source, path):
    assert layering_faults(source, path) == []


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.mesh",
        "from jax._src import mesh",
        "from jax import experimental",
        "from jax.experimental import topologies",
        "from jax.interpreters import pxla",
        "def f():\n    import jax.extend.backend",
        "import jax\njax.experimental.enable_x64()",
        "import importlib\nimportlib.import_module('jax._src.xla_bridge')",
    ],
)
def test_check_sees_private_jax(source):
    assert private_faults(source, "meshes/a.py")
    assert private_faults(source, "_compat.py") == []


def test_check_lets_public_jax_pass():
    assert private_faults("from jax.sharding import Mesh\nimport jax.numpy", "meshes/a.py") == []

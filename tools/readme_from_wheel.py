"""Runs every block of the README where only the built wheel and what it depends on is installed.

    python tools/readme_from_wheel.py VENV CONSTRAINTS

Makes the wheel and the environment VENV, then pastes: the Python of the page into one interpreter,
as doctests; commands with the output that is shown; other commands, which must succeed. What is
of a checkout (`make`) or installs more is not run. Then looks at the links of a wheel that is built
from a clone with an address.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PASTED = """
import doctest, sys
text = open(sys.argv[1]).read()
test = doctest.DocTestParser().get_doctest(text, {}, "README.md", "README.md", 0)
result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
print(f"{result.attempted} examples, {result.failed} failed")
sys.exit(bool(result.failed))
"""


def blocks(kind: str) -> list[str]:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)


def install(where: Path, constraints: Path) -> None:
    """Build the wheel and make an environment with nothing but it."""
    venv.create(where, clear=True, with_pip=True)
    pip = [str(where / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as built:
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", built, str(ROOT)], check=True)
        (wheel,) = map(str, Path(built).glob("*.whl"))
        subprocess.run([*pip, "install", "--constraint", str(constraints), wheel], check=True)


def links_lead_home(where: Path) -> bool:
    """Whether a wheel of a clone of a published project has links, and no picture without one."""
    pip = [str(where / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        clone, remote = (
            Path(folder) / "clone",
            "https://name:secret@example.org/team/meshwright.git",
        )
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run(["git", "-C", str(clone), "remote", "set-url", "origin", remote], check=True)
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, str(clone)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
            text = archive.read(name).decode()
    home = "https://example.org/team/meshwright"
    pictures = re.findall(r'<img src="([^"]*)"', text)
    good = f"Project-URL: Homepage, {home}\n" in text and "secret" not in text
    good = good and bool(pictures) and all(each.startswith(f"{home}/raw/") for each in pictures)
    good = good and not re.search(r"\]\((?!https?:|#)", text)
    print(f"{'ok' if good else 'FAILED'}: the links of a wheel lead to where it was cloned from")
    return good


def paste(where: Path) -> int:
    """Run the page's blocks in an empty folder; return how many did not do what they say."""
    programs = where.absolute() / "bin"
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "pasted.txt"
        script.write_text("\n".join(blocks("python")), encoding="utf-8")
        command = [str(programs / "python"), "-c", PASTED, str(script)]
        failed += subprocess.run(command, cwd=folder, check=False).returncode != 0
        for block in blocks("console"):
            for entry in re.split(r"^\$ (?=\S)(?!\$)", block, flags=re.MULTILINE)[1:]:
                line, _, shown = entry.partition("\n")
                failed += not _runs(line, programs, folder, shown)
        for block in blocks("sh"):
            for line in block.splitlines():
                if line.startswith("meshwright "):
                    failed += not _runs(line, programs, folder, None)
    return failed


def _runs(line: str, programs: Path, folder: str, shown: str | None) -> bool:
    name, *words = shlex.split(line)
    done = subprocess.run(
        [str(programs / name), *words], cwd=folder, capture_output=True, text=True, check=False
    )
    good = done.returncode == 0 and (shown is None or done.stdout + done.stderr == shown)
    print(f"{'ok' if good else 'FAILED'}: {line}", flush=True)
    if not good:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
    return good


def main(where: Path, constraints: Path) -> int:
    install(where, constraints)
    failed = paste(where) + (not links_lead_home(where))
    print(f"the README from the wheel: {f'{failed} failed' if failed else 'every block runs'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

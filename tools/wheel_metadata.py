"""What a built wheel says of its project: the links, and a README that reads right outside of it.

A build hook of hatchling (`[tool.hatch.metadata.hooks.custom]` in pyproject.toml). The address is
that of the clone, `git remote get-url origin`, without any user name or password in it: whoever
publishes a wheel builds it from the project's own home, and a fork points to the fork. Without an
address on the web (no remote, a remote that is a folder) the wheel has no links, and the README's
stay as they are.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hatchling.metadata.plugin.interface import MetadataHookInterface

_SSH = re.compile(r"(?:ssh://)?[\w.-]+@(?P<host>[\w.-]+)(?::\d+/|[:/])(?P<path>[^:]+)")
_LINK = re.compile(r'(?P<before>\]\(|(?P<image>src|srcset)=")(?P<path>[^)"#:\s]+)(?=[)"#])')


def web_address(remote: str) -> str:
    """The address on the web of a git remote, or "" if it has none.

    >>> web_address("https://me:secret@example.org/team/meshwright.git")
    'https://example.org/team/meshwright'
    >>> web_address("git@example.org:team/meshwright.git")
    'https://example.org/team/meshwright'
    >>> web_address("/somewhere/meshwright"), web_address("file:///somewhere/meshwright")
    ('', '')
    """
    remote = remote.strip().rstrip("/").removesuffix(".git")
    parts = urlsplit(remote)
    if parts.scheme in ("http", "https") and parts.hostname:
        port = f":{parts.port}" if parts.port else ""
        return f"https://{parts.hostname}{port}{parts.path}"
    match = _SSH.fullmatch(remote)
    return f"https://{match['host']}/{match['path']}" if match else ""


def links(address: str) -> dict[str, str]:
    """The `[project.urls]` of a project at an address; none without one."""
    if not address:
        return {}
    return {
        "Homepage": address,
        "Documentation": f"{address}/blob/HEAD/docs/index.md",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def absolute(page: str, address: str) -> str:
    """A Markdown page whose links and pictures lead to the project, wherever it is read.

    >>> print(absolute('<img src="docs/a.png">\\n[b](docs/b.md#c) [d](#e)', "https://example.org/x"))
    <img src="https://example.org/x/raw/HEAD/docs/a.png">
    [b](https://example.org/x/blob/HEAD/docs/b.md#c) [d](#e)
    """
    if not address:
        return page

    def full(match: re.Match[str]) -> str:
        kind = "raw" if match["image"] else "blob"
        return f"{match['before']}{address}/{kind}/HEAD/{match['path']}"

    return _LINK.sub(full, page)


def origin(root: Path) -> str:
    """The clone's own remote, or "" if it has none."""
    if not (root / ".git").exists():  # an unpacked archive, perhaps inside of another project
        return ""
    try:
        command = ["git", "-C", str(root), "remote", "get-url", "origin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return ""
    return done.stdout if done.returncode == 0 else ""


class WheelMetadata(MetadataHookInterface):
    """Fills in the `readme` and the `urls` that pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        address = web_address(origin(root))
        page = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(page, address)}
        if address:
            metadata["urls"] = links(address)

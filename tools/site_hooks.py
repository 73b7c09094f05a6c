"""What `mkdocs` does for the site beyond Markdown: `make docs` loads this file as hooks.

In: the pages of `docs/`, the examples, the changelog. Out: the same as pages, with links that lead
somewhere, examples that copy without prompts, and drawings that follow the site's light and dark.
At the end every page is checked: nothing is loaded from another host, nothing copies a prompt.
"""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent

# Pages made from files that lie outside of docs/.
WHOLE_FILES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}

PROMPTED = re.compile(r"^```python\n(?=>>> )(.*?)\n*^```$", re.MULTILINE | re.DOTALL)
DOCTEST_FLAG = re.compile(r" *# doctest: \+\w+$", re.MULTILINE)
EXAMPLE = re.compile(r'<div class="(language-(?:pycon|console)[^"]*)">(.*?)</div>', re.DOTALL)
TABLE = re.compile(r"<table>\s*<thead>(.*?)</thead>.*?</table>", re.DOTALL)
MOST_COLUMNS = 8  # that are legible side by side
DRAWING = re.compile(r"^!\[([^\]]*)\]\(([\w./-]+\.svg)\)$", re.MULTILINE)
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b[^>]*\bhref=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|url\(["']?(?:https?:)?//[^)]+|@import[^;]+//[^;]+"""
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the examples, the changelog and the rules for contributors."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.stem}.md", content=example_page(path)))
    files.append(File.generated(config, "examples/cluster.md", content=cluster_page()))
    for page, name in WHOLE_FILES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def example_page(path: Path) -> str:
    """Write an example as a page: its first sentence, how to run it, and its source."""
    source = path.read_text()
    doc = ast.get_docstring(ast.parse(source)) or ""
    first, _, rest = doc.partition("\n\n")
    command = rest.strip().splitlines()[0] if rest.strip() else f"python examples/{path.name}"
    return (
        f"# {path.stem}\n\n{' '.join(first.split())}\n\n```sh\n{command}\n```\n\n"
        f"```python\n{source.rstrip()}\n```\n"
    )


def cluster_page() -> str:
    """Write the files of examples/cluster, the program first, as one page."""
    folder = ROOT / "examples" / "cluster"
    page = "# On a cluster\n\nOne program and a file per engine: [launching](../launching.md).\n"
    for path in sorted(folder.glob("*.*"), key=lambda path: (path.name != "train.py", path.name)):
        language = {".py": "python", ".sh": "sh", ".yaml": "yaml"}[path.suffix]
        page += f"\n## {path.name}\n\n```{language}\n{path.read_text().rstrip()}\n```\n"
    return page


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark prompts as prompts, lead links to generated pages, put drawings into the page."""
    markdown = PROMPTED.sub(lambda m: f"```pycon\n{DOCTEST_FLAG.sub('', m[1])}\n```", markdown)
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)*examples/(\w+)\.py\)", rf"]({up}examples/\1.md)", markdown)
    cluster = r"\]\((?:\.\./)*examples/cluster/train\.py\)"
    markdown = re.sub(cluster, f"]({up}examples/cluster.md)", markdown)
    for target, name in WHOLE_FILES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{name}\)", f"]({up}{target})", markdown)
    folder = Path(page.file.abs_src_path or config.docs_dir).parent
    return DRAWING.sub(lambda m: inlined(folder / m[2], m[1]), markdown)


def inlined(path: Path, caption: str) -> str:
    """Return a drawing as a part of its page, so that it has the page's colours."""
    svg = re.sub(r"<\?xml.*?\?>\s*", "", path.read_text()).strip()
    # A rule for the reader's system would contradict the switch of the site.
    svg = re.sub(r"@media *\(prefers-color-scheme: *dark\) *\{(?:[^{}]*\{[^{}]*\})*\s*\}", "", svg)
    one_line = re.sub(r"\s*\n\s*", " ", svg)
    return f'<figure class="drawing" aria-label="{caption}">{one_line}</figure>'


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give examples with prompts the text that is copied; let wide tables scroll, not wrap."""
    content = EXAMPLE.sub(
        lambda m: f'<div class="{m[1]}" data-copy="{html.escape(typed(m[2]))}">{m[2]}</div>',
        content,
    )
    return TABLE.sub(
        lambda m: (
            f'<div class="many-columns">{m[0]}</div>' if m[1].count("<th") > MOST_COLUMNS else m[0]
        ),
        content,
    )


def typed(block: str) -> str:
    """Return what one types of a highlighted block: no prompts, no output."""
    lines = []
    inside = False  # of an input: there `...` is a prompt, elsewhere it is output left out
    for line in html.unescape(re.sub(r"<[^>]+>", "", block)).splitlines():
        starts = line.startswith((">>> ", "$ "))
        inside = starts or (inside and (line.startswith("... ") or line == "..."))
        if inside:
            lines.append(line.removeprefix("$ ") if line.startswith("$ ") else line[4:])
    return "\n".join(lines)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that loads anything from another host, or whose examples copy prompts."""
    faults = []
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css"):
            text = path.read_text()
            faults += [f"{path.name} loads {match}" for match in LOADED.findall(text)]
            copied = re.findall(r'data-copy="([^"]*)"', text)
            faults += [
                f"{path.name}: a prompt is copied" for code in copied if "&gt;&gt;&gt; " in code
            ]
            if text.count('"language-pycon') > len(copied):
                faults.append(f"{path.name}: an example is copied with its output")
    if faults:
        raise PluginError("\n".join(faults[:20]))

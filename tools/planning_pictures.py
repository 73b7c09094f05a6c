"""Draw the pictures of docs/planning.md: run its examples, and let the plans draw themselves.

python tools/planning_pictures.py
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from meshwright.planning.plan_drawing import arrays_picture, scatter_picture

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    """Write plan_arrays.svg and plan_tried.svg."""
    page = (DOCS / "planning.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    names: dict[str, object] = {}
    test = doctest.DocTestParser().get_doctest(code, names, "planning.md", None, 0)
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False)
    pictures = {
        "plan_arrays.svg": arrays_picture(test.globs["two"]),
        "plan_tried.svg": scatter_picture(test.globs["p"]),
    }
    for name, html in pictures.items():
        found = re.search(r"<svg.*?</svg>", html, re.DOTALL)
        if found is None:
            raise SystemExit(f"{name}: nothing was drawn")
        # A grey that can be read on white and on black: a file does not know the page around it.
        text = found[0].replace("<svg ", '<svg color="#6b7684" font-family="sans-serif" ', 1)
        (DOCS / name).write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

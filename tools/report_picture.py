"""The picture of a report in the README: its top on a desk, and on a phone at night.

python tools/report_picture.py meshwright-report.html docs
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "report"))

import chromium

VIEWS = (("report.png", 1080, 800, False), ("report-phone.png", 390, 800, True))


def main() -> None:
    report, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    with chromium.open_page() as page:
        for name, width, height, dark in VIEWS:
            page.events.clear()
            page.show(report.as_uri(), width=width, dark=dark)
            (folder / name).write_bytes(page.picture(height))


if __name__ == "__main__":
    main()

"""Makes report.png, the picture in the README: the upper part of the report on the quickstart run, in the light scheme.

    bert-tasks train recipes/quickstart.toml --output-dir runs/quickstart --quiet
    python docs/images/report.py runs/quickstart/report.html docs/images/report.png

Needs Debian's chromium, chromium-driver and fonts-inter (the font of the picture here), and the extra `dev`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.browser import open_browser

WIDTH, MOST_BYTES = 1100, 150_000
BELOW_RESULTS = (
    "return Math.round(document.querySelector('main section').getBoundingClientRect().bottom + scrollY + 10)"
)

if __name__ == "__main__":
    page, picture = Path(sys.argv[1]), Path(sys.argv[2])
    with open_browser() as browser:
        browser.open(page, width=WIDTH)
        browser.screenshot(picture, height=browser.run(BELOW_RESULTS))
    if picture.stat().st_size > MOST_BYTES:
        sys.exit(f"{picture}: {picture.stat().st_size} bytes, at most {MOST_BYTES}")

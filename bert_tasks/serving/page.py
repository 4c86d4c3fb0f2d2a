"""The page that tries the model: one static file, and the policy under which a browser may run it.

Must not know the task: the page asks ``GET /model``.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files


@cache
def page() -> tuple[bytes, str]:
    """The file and its Content-Security-Policy, which allows this script and this style and no others."""
    content = files("bert_tasks.serving").joinpath("page.html").read_bytes()
    script, style = (_source(content, name) for name in (b"script", b"style"))
    rules = (
        "default-src 'none'",
        f"script-src {script}",
        f"style-src {style}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return content, "; ".join(rules)


def _source(content: bytes, element: bytes) -> str:
    found = re.findall(b"<%b>(.*?)</%b>" % (element, element), content, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(part).digest()).decode() for part in found]
    return " ".join(f"'sha256-{value}'" for value in hashes)

"""The dashboard's page: one document with all that it needs in it, and a policy that says so."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from aiohttp import hdrs, web

# In this order, for they are one script: later ones use what earlier ones define.
_SCRIPTS = ("elements", "format", "chart", "pool", "segments", "branches", "misses", "live")


async def dashboard(request: web.Request) -> web.Response:
    """GET /dashboard: a page that shows `/dashboard/data`; it holds no data and needs no key."""
    text, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        hdrs.CACHE_CONTROL: "no-cache",
    }
    return web.Response(text=text, content_type="text/html", headers=headers)


@cache
def _page() -> tuple[str, str]:
    """The document, and the Content-Security-Policy that allows its own code and no other's."""
    style = _read("dashboard.css")
    script = "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    text = _read("dashboard.html").replace("{style}", style).replace("{script}", script)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(code: str) -> str:
    return f"'sha256-{b64encode(sha256(code.encode()).digest()).decode()}'"

"""Headers of a message that goes on to somebody else (RFC 9110, 7.6.1)."""

from __future__ import annotations

from aiohttp import hdrs
from multidict import CIMultiDict, CIMultiDictProxy

_OF_ONE_HOP = {
    hdrs.CONNECTION,
    hdrs.KEEP_ALIVE,
    hdrs.PROXY_AUTHENTICATE,
    hdrs.PROXY_AUTHORIZATION,
    hdrs.TE,
    hdrs.TRAILER,
    hdrs.TRANSFER_ENCODING,
    hdrs.UPGRADE,
    hdrs.CONTENT_LENGTH,  # is that of what we send
    hdrs.EXPECT,
    hdrs.HOST,
    hdrs.DATE,
    hdrs.SERVER,
}


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Those that are meant for the other end."""
    named = ",".join(headers.getall(hdrs.CONNECTION, [])).split(",")
    dropped = {each.lower() for each in (*_OF_ONE_HOP, *map(str.strip, named))}
    kept = CIMultiDict((name, value) for name, value in headers.items())
    for name in dropped:
        kept.popall(name, None)
    return kept

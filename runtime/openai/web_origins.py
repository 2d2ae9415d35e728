"""Tells the requests that web pages of others have made a browser send from all other requests.

A page may have the browser of its visitor POST to any address that the visitor's machine reaches. It cannot read the
answer, but the server would work for it. Browsers say where such requests come from, in headers that no page can set.
"""

from collections.abc import Collection, Mapping
from urllib.parse import urlsplit


def is_own_or_no_page(headers: Mapping[str, str], allowed_hosts: Collection[str] = ()) -> bool:
    """Returns whether a request comes from the server's own page, or from something that is no web page.

    Newer browsers say it themselves (Sec-Fetch-Site), to servers of the same machine or with TLS. The header Origin of
    others must name the host that the request is for. Clients that are no browsers send neither.

    Args:
      headers: Of the request.
      allowed_hosts: Hosts whose pages may send requests, too; "*" allows any.
    """
    site, origin = headers.get("Sec-Fetch-Site"), headers.get("Origin")
    if "*" in allowed_hosts or site in ("same-origin", "none"):
        return True
    if origin is None:
        return site is None
    try:
        found = urlsplit(origin)
        name = found.hostname or ""
    except ValueError:
        return False
    if name and name in {each.lower() for each in allowed_hosts}:
        return True
    return site is None and bool(found.netloc) and found.netloc.lower() == headers.get("Host", "").lower()

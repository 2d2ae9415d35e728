"""The keys under which pages are found again. Serves step 4 of 10.

In: the tokens of a request. Out: one key for each full page, a hash of all tokens up to its end and of the
request's `cache_salt`. Equal keys mean equal contents: SHA-256 leaves no room for chance, nor for a stranger who
does not know the salt.
"""

import hashlib
from array import array

from ..api.request import Request


def extend_page_keys(request: Request, page_size: int, num_pages: int) -> None:
    """Makes `request.page_keys` cover its first `num_pages` pages, whose tokens must be known.

    About 1.5 us a page of 32 tokens. It never changes a key that is there.
    """
    keys = request.page_keys
    if len(keys) >= num_pages:
        return
    key = keys[-1] if keys else hashlib.sha256(request.cache_salt.encode()).digest()
    for start in range(len(keys) * page_size, num_pages * page_size, page_size):
        token_ids = array("q", request.tokens(start, start + page_size))
        key = hashlib.sha256(key + token_ids.tobytes()).digest()
        keys.append(key)

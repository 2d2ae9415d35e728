"""Computes the prefix cache keys of pages. Serves step 4 of 10.

In: the tokens of a request. Out: one key per full page, a SHA-256 hash of the key of the weights, of the request's
adapter, by its content, and `cache_salt`, and of all tokens up to the end of the page. Equal keys mean equal contents:
collisions are infeasible, both by accident and for an attacker who does not know the salt.
"""

import hashlib
from array import array

from ..api.request import Request


def begin_page_keys(request: Request, weights_key: bytes) -> None:
    """Drops the keys of a request, because other weights compute its pages from now on."""
    request.page_keys.clear()
    request.weights_key = weights_key


def extend_page_keys(request: Request, page_size: int, num_pages: int) -> None:
    """Extends `request.page_keys` to its first `num_pages` pages, whose tokens must be known.

    Takes about 1.5 us per page of 32 tokens. Existing keys never change, except with the weights.
    """
    keys = request.page_keys
    if len(keys) >= num_pages:
        return
    key = keys[-1] if keys else _first_key(request)
    for start in range(len(keys) * page_size, num_pages * page_size, page_size):
        token_ids = array("q", request.tokens(start, start + page_size))
        key = hashlib.sha256(key + token_ids.tobytes()).digest()
        keys.append(key)


def _first_key(request: Request) -> bytes:
    """Returns what the key of the first page continues: the key of the weights, the adapter's digest, and the salt.

    Both are empty or as long as a hash, and hashed before the salt is, so that no salt passes for one.
    """
    key = hashlib.sha256(request.cache_salt.encode()).digest()
    for digest in (bytes.fromhex(request.adapter_digest), request.weights_key):
        key = hashlib.sha256(digest + key).digest() if digest else key
    return key

"""Follows a sample of a constraint as the engine does, but waits for each mask."""

from collections.abc import Sequence

from meshserve.runtime.text.grammar import Grammar
from meshserve.runtime.text.mask_exchange import MaskExchange, Matcher
from tests.waiting import WAIT_SECONDS


class Follower:
    """One sample. Samples that share an exchange share workers, as those of one engine do."""

    def __init__(self, grammar: Grammar, exchange: MaskExchange | None = None):
        self.exchange = exchange if exchange is not None else MaskExchange()
        self.matcher = Matcher(grammar)

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Consumes tokens one by one. Returns False if the sample fails."""
        for token_id in token_ids:
            self.exchange.advance(self.matcher, token_id)
            wait_for_masks(self.exchange, [self.matcher])
            if self.matcher.failure is not None:
                return False
        return True


def wait_for_masks(exchange: MaskExchange, matchers: Sequence[Matcher]) -> None:
    """Waits until none of the samples waits for a mask."""
    while any(matcher.is_waiting for matcher in matchers):
        exchange.renew(WAIT_SECONDS, for_any=True)

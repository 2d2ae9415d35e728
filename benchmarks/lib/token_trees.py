"""How many tokens a verifying step brings with draft tokens in a chain or a tree, counted on texts that are known.

Letters: Q requests, R roots (the positions of each request after which drafts could be made), D depth of a tree.

A root's drafts are accepted as far as the text follows a path of the tree. So a tree is judged without verifying it: by
the *rank* of each of the text's tokens among the choices of the drafter where all before it are the text's (0 is the
first choice), or, for trees that differ from root to root, by what else was in the tree.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Path = tuple[int, ...]  # the ranks from a tree's root to a node

UNRANKED = 10**6  # the rank of a token that the drafter cannot choose


class Gain(NamedTuple):
    """The tokens that a step brings: accepted drafts, and the one that follows them."""

    tokens: float  # the mean of all steps
    error: float  # its standard error, from the differences between requests

    def __str__(self) -> str:
        return f"{self.tokens:.3f} +- {self.error:.3f}"


def gain(accepted: np.ndarray) -> Gain:
    """Walks through each request, from step to step.

    Args:
      accepted: [Q, R], how many drafts are accepted after each root.
    """
    tokens, steps = np.zeros(len(accepted)), np.zeros(len(accepted))
    for request, counts in enumerate(accepted):
        root = 0
        while root < len(counts):
            tokens[request] += 1 + counts[root]
            steps[request] += 1
            root += 1 + int(counts[root])
    mean = tokens.sum() / steps.sum()
    return Gain(mean, float(np.sqrt(((tokens - mean * steps) ** 2).sum())) / steps.sum())


def accepted_by_tree(ranks: np.ndarray, tree: Sequence[Path]) -> np.ndarray:
    """Returns the accepted drafts [Q, R] of a tree that is the same everywhere.

    Args:
      ranks: [Q, R, D], of the text's tokens.
      tree: The paths of all nodes; a node's parent must be among them.
    """
    accepted = np.zeros(ranks.shape[:2], int)
    for path in tree:
        holds = (ranks[..., : len(path)] == path).all(axis=-1)
        accepted = np.where(holds, np.maximum(accepted, len(path)), accepted)
    return accepted


def chain(num_drafts: int) -> list[Path]:
    return [(0,) * length for length in range(1, num_drafts + 1)]


def side_by_side(lengths: Sequence[int]) -> list[Path]:
    """Returns the tree of a chain after each of the first choices, as long as `lengths` says."""
    return [(rank, *(0,) * (length - 1)) for rank, most in enumerate(lengths) for length in range(1, most + 1)]


def best_fixed_tree(ranks: np.ndarray, num_nodes: int, depth: int) -> list[Path]:
    """Returns the tree of so many nodes, at most so deep, that accepts most after all roots of `ranks` [Q, R, D].

    A node adds the share of roots at which its path is the text's, which is never more than its parent's: so the most
    frequent paths are a tree, and no other brings more (Chen et al., "Sequoia", 2024, without a limit on branches).
    """
    paths = ranks.reshape(-1, ranks.shape[-1]).tolist()
    counts = Counter(
        tuple(path[:length]) for path in paths for length in range(1, depth + 1) if UNRANKED not in path[:length]
    )
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))[:num_nodes]


def accepted_by_order(places: np.ndarray, num_nodes: int) -> np.ndarray:
    """Returns the accepted drafts [Q, R] of trees that take a root's first nodes in an order of its own.

    Args:
      places: [Q, R, D], the place in this order of the node that is the text's at each depth.
      num_nodes: How many nodes are taken.
    """
    return np.cumprod(places < num_nodes, axis=-1).sum(axis=-1)


class LookedUp(NamedTuple):
    """The drafts of prompt lookup at a root."""

    first: int  # how many tokens hold of what followed the last occurrence
    second: int | None  # of what followed the last occurrence that went on differently; None if there is none


def looked_up(tokens: Sequence[int], num_known: int, min_match: int, num_drafts: int) -> Iterator[LookedUp | None]:
    """Yields, for each root from `num_known` tokens on, what prompt lookup would draft; None without a match.

    As `drafting.prompt_lookup`, which goes on with a match as long as it holds.
    """
    behind: dict[Path, list[int]] = {}
    for root, following in enumerate(tokens):
        run = tuple(tokens[max(root - min_match, 0) : root])
        places = behind.setdefault(run, [])
        if root >= num_known:
            yield _drafts(tokens, root, places, num_drafts)
        if len(run) == min_match:
            places[:] = [place for place in places if tokens[place] != following] + [root]


def _drafts(tokens: Sequence[int], root: int, places: Sequence[int], num_drafts: int) -> LookedUp | None:
    held = [_common(tokens, place, root, num_drafts) for place in reversed(places[-2:])]
    return LookedUp(held[0], held[1] if len(held) > 1 else None) if held else None


def _common(tokens: Sequence[int], place: int, root: int, most: int) -> int:
    """Returns how many tokens from `place` on are those from `root` on; beyond the root, the span repeats."""
    period = root - place
    pairs = ((tokens[place + index % period], tokens[root + index]) for index in range(min(most, len(tokens) - root)))
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class StepTimes(NamedTuple):
    """What a step of some requests with drafts takes, in milliseconds."""

    verify_ms: Mapping[int, float]  # by positions in the step, between which it is interpolated
    request_ms: float  # for each request after the first
    chain_pass_ms: float  # a pass of the drafter, one row a request
    tree_pass_ms: float  # a pass with the rows of a tree's level
    host_ms: float  # from the tokens of a step to the dispatch of the next, which plain steps hide

    def speed(self, gain: float, num_requests: int, num_nodes: int, passes: int, *, is_chain: bool) -> float:
        """Returns the tokens a second of all requests."""
        pass_ms = self.chain_pass_ms if is_chain else self.tree_pass_ms
        positions = num_requests * (1 + num_nodes)
        step_ms = self._verify(positions, num_requests) + passes * pass_ms + self.host_ms * (passes > 0)
        return 1000 * num_requests * gain / step_ms

    def _verify(self, positions: int, num_requests: int) -> float:
        known = sorted(self.verify_ms)
        if positions > known[-1]:
            return float("inf")
        measured = [self.verify_ms[count] for count in known]
        return float(np.interp(positions, known, measured)) + self.request_ms * (num_requests - 1)

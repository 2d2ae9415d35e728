"""Measures how many more tokens a verifying step would bring with a tree of draft tokens than with a chain.

    meshserve bench draft_trees --text PLAY.txt

The engine writes texts with the demo model after parts of PLAY.txt. Where its draft head would have followed them is
then computed at every position, by the formulas that trained the head (`deploy.demo.head_network`), with the noise of
the requests: a tree's i-th branch is the token with the i-th largest sum of logit and noise, and it holds if it is the
next token of the text. Nothing is verified, so that trees can be compared that the engine does not have:

* chains of k tokens;
* two or more chains side by side, which begin with the first choices;
* the best tree that is the same at every position, fitted to half of the requests; all trees are counted on the others;
* trees by confidence (Li et al., "EAGLE-2", 2024): the nodes whose tokens are most probably right, all before included.

Beside them, prompt lookup with a second branch where the same tokens had another continuation. Then tokens a step
become tokens a second with times of steps that were measured elsewhere: by default, those of Qwen3-8B on an H100
(docs/log/scheduler.md). Those of the draft passes were not measured; they follow from the bytes that a pass reads.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file

from meshserve.benchmarks.lib import token_trees
from meshserve.benchmarks.lib.offline_engine import OfflineEngine, config_for
from meshserve.benchmarks.lib.token_trees import UNRANKED, Gain, StepTimes, gain
from meshserve.benchmarks.lib.workloads import Work
from meshserve.deploy.demo.head_network import (
    LAYERS_READ,
    HeadSizes,
    Keys,
    draft_logits,
    draft_step,
    head_logits,
    load_head,
    merged_features,
)
from meshserve.deploy.demo.network import NetworkConfig, Parameters, forward_with_inputs
from meshserve.runtime.program.sampling import SamplingBatch, _gumbel_pairs
from meshserve.runtime.startup.launch import open_model
from meshserve.runtime.text.tokenizer import open_tokenizer
from meshserve.runtime.weights.locate import DEMO_HEAD, DEMO_MODEL, find_model

_SPREADS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
_REQUESTS_AT_ONCE = 8
_MIN_AGREEMENT = 0.98  # of the engine's tokens with those of the formulas; near ties differ


class Drafting(NamedTuple):
    """What is needed to draft after all roots of some requests."""

    head: Parameters
    embedding: jax.Array  # [V, D], of the served model
    token_ids: jax.Array  # [v], of the head's vocabulary
    ids: jax.Array  # [Q, T] int32, the texts
    states: list[jax.Array]  # of each layer read, its inputs [Q, T, D]
    noise: jax.Array  # [Q, T + 1, v], that of the token at each position; 0 if tokens are not drawn
    temperature: float  # the divisor of the logits
    served: jax.Array  # [Q, T, v], the served model's logits of the token after each position


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if max(options.positions) > 2 * options.width:
        raise ValueError(f"--positions {max(options.positions)}: --width {options.width} allows {2 * options.width}.")
    prompts = _prompts(options)
    times = StepTimes(
        dict(options.step_ms), options.request_ms, options.chain_pass_ms, options.tree_pass_ms, options.host_ms
    )
    for temperature in options.temperature:
        ids = np.asarray(_written(prompts, options, temperature), np.int32)
        drafting = list(_drafting_of_parts(ids, temperature, options.input_tokens))
        first = options.input_tokens - 1
        found = [_ranks(each, options.depth) for each in drafting]
        ranks, losses = (np.concatenate(each)[:, first:] for each in zip(*found, strict=True))
        half = len(ids) // 2
        spread = _SPREADS[int(losses[:half].reshape(-1, len(_SPREADS)).mean(axis=0).argmin())]
        places = np.concatenate([_places(each, options.depth, options.width, spread) for each in drafting])[:, first:]
        print(f"temperature {temperature:g}: {ranks[half:].size // options.depth} roots, spread {spread:g}")
        for place in range(options.depth):
            _print_shares(ranks[half:], place)
        _compare(ranks[:half], ranks[half:], places[half:], times, options)
        for towards in options.towards:
            found = [_ranks(each, options.depth, towards) for each in drafting]
            ranks = np.concatenate([each for each, _ in found])[:, first:]
            print(f"the head's log-probabilities with {towards:g} of the served model's:")
            _compare(ranks[:half], ranks[half:], None, times, options)
        _print_lookup("demo texts", ids[half:].tolist(), options.input_tokens, options)
    for path in options.lookup_text:
        token_ids = open_tokenizer(find_model(DEMO_MODEL).small).encode(path.read_text())
        _print_lookup(path.name, [token_ids], len(token_ids) // 2, options)
    return 0


def _prompts(options: argparse.Namespace) -> list[list[int]]:
    """Returns parts of the text at equal distances.

    Raises:
      ValueError: It is too short.
    """
    token_ids = list(open_tokenizer(find_model(DEMO_MODEL).small).encode(options.text.read_text()))
    distance = (len(token_ids) - options.input_tokens) // options.requests
    if distance < 1:
        needed = options.input_tokens + options.requests
        raise ValueError(f"--text has {len(token_ids)} tokens; {needed} are needed. Use a longer one.")
    starts = range(0, distance * options.requests, distance)
    return [token_ids[start : start + options.input_tokens] for start in starts]


def _written(prompts: list[list[int]], options: argparse.Namespace, temperature: float) -> list[list[int]]:
    """Returns the prompts with what the engine makes of them; request i has seed i."""
    works = [Work(prompt, options.output_tokens) for prompt in prompts]
    model, make_params = open_model(DEMO_MODEL, random_weights=False)
    settings = {
        "model": DEMO_MODEL, "dtype": "float32", "cpu_devices": options.cpu_devices, "logits_processors": False,
        "page_size": 16,
    }  # fmt: skip
    with OfflineEngine(config_for([works], settings), model, make_params) as engine:
        engine.run(works, temperature)
        return [[*prompt, *tokens] for prompt, tokens in zip(prompts, engine.tokens, strict=True)]


def _drafting_of_parts(ids: np.ndarray, temperature: float, num_prompt: int) -> Iterator[Drafting]:
    """Raises RuntimeError if the texts are not those of the formulas and the noise."""
    seeds = np.arange(len(ids), dtype=np.uint32)
    for start in range(0, len(ids), _REQUESTS_AT_ONCE):
        part = slice(start, start + _REQUESTS_AT_ONCE)
        drafting, best = _drafting(ids[part], seeds[part], temperature)
        agreement = float((best[:, num_prompt - 1 : -1] == ids[part, num_prompt:]).mean())
        if agreement < _MIN_AGREEMENT:
            raise RuntimeError(f"only {agreement:.1%} of the engine's tokens are those of deploy.demo.network")
        yield drafting


def _drafting(ids: np.ndarray, seeds: np.ndarray, temperature: float) -> tuple[Drafting, np.ndarray]:
    """Returns what drafting needs, and the token [Q, T] that the served model would have chosen after each position."""
    tensors = load_file(find_model(DEMO_MODEL).small / "model.safetensors")
    served = {name: value.astype(jnp.float32) for name, value in tensors.items()}
    head, token_ids = load_head(find_model(DEMO_HEAD).small)
    logits, inputs = _forward(served, ids)
    noise = _noise((ids.shape[0], ids.shape[1] + 1), seeds, temperature, logits.shape[-1])
    divisor = temperature or 1.0
    best = np.asarray((logits / divisor + noise[:, 1:]).argmax(axis=-1))
    states = [inputs[layer] for layer in LAYERS_READ]
    embedding = served["model.embed_tokens.weight"]
    known = jnp.asarray(token_ids)
    return Drafting(
        head, embedding, known, jnp.asarray(ids), states, noise[..., known], divisor, logits[..., known]
    ), best


@jax.jit
def _forward(served: Parameters, ids: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    return forward_with_inputs(served, ids, NetworkConfig())


def _noise(shape: tuple[int, int], seeds: np.ndarray, temperature: float, num_tokens: int) -> jax.Array:
    """Returns the noise [Q, T, V] of each position's token; 0 at temperature 0."""
    if not temperature:
        return jnp.zeros((*shape, num_tokens))
    nothing, positions = jnp.zeros(shape[1]), jnp.arange(shape[1], dtype=jnp.int32)
    found = []
    for seed in seeds:
        low, high = jnp.full(shape[1], seed), jnp.zeros(shape[1], jnp.uint32)
        params = SamplingBatch(nothing, nothing, nothing, nothing, low, high, positions)
        pairs = jnp.stack(_gumbel_pairs(params, jnp.arange(-(-num_tokens // 2))), axis=-1)
        found.append(pairs.reshape(shape[1], -1)[:, :num_tokens])
    return jnp.stack(found)


@partial(jax.jit, static_argnames="depth")
def _ranks(drafting: Drafting, depth: int, towards: float = 0.0) -> tuple[jax.Array, jax.Array]:
    """Returns the ranks [Q, R, depth] of the texts' tokens, and what each of `_SPREADS` costs, [Q, R, spreads].

    The cost is the cross entropy, in nats, of softmax(scores / spread) and the text, where the head has its token.
    With `towards`, the log-probabilities are this share of the served model's and the rest of the head's.
    """
    embedded = drafting.embedding[drafting.ids]
    ranks, losses = [], jnp.zeros(())
    for step, own in enumerate(draft_logits(drafting.head, drafting.states, embedded, HeadSizes(), depth)):
        served = jax.nn.log_softmax(drafting.served[:, step + 1 : step + 1 + own.shape[1]], axis=-1)
        logits = (1 - towards) * jax.nn.log_softmax(own, axis=-1) + towards * served
        scores, is_next = _scores_and_next(drafting, logits, step)
        score = jnp.where(is_next, scores, -jnp.inf).max(axis=-1)
        is_known = is_next.any(axis=-1)
        ranks.append(jnp.where(is_known, (scores > score[..., None]).sum(axis=-1), UNRANKED))
        costs = [jax.nn.logsumexp(scores / spread, axis=-1) - score / spread for spread in _SPREADS]
        losses = losses + jnp.where(is_known[..., None], jnp.stack(costs, axis=-1), 0.0)
    return jnp.stack(ranks, axis=-1), losses


def _scores_and_next(drafting: Drafting, logits: jax.Array, step: int) -> tuple[jax.Array, jax.Array]:
    """Returns the scores [Q, R, v] of draft token number `step`, and which token is the text's."""
    num_roots = logits.shape[1]
    noise = drafting.noise[:, step + 2 : step + 2 + num_roots]
    following = drafting.ids[:, step + 2 : step + 2 + num_roots]
    return logits / drafting.temperature + noise, drafting.token_ids == following[..., None]


def _places(drafting: Drafting, depth: int, width: int, spread: float) -> np.ndarray:
    """Grows a tree by confidence after each root: `width` nodes of each level are expanded.

    Returns:
      [Q, R, depth, depth] int: for trees at most 1, 2 ... deep, the place that the text's node at each depth has among
      all nodes in the order of their confidence, or UNRANKED.
    """
    confidences, of_text = (np.asarray(each) for each in _grown(drafting, depth, width, spread))
    places = np.full((*of_text.shape[1:], depth, depth), UNRANKED)
    for deepest in range(1, depth + 1):
        nodes = np.concatenate(list(confidences[:deepest]), axis=-1)
        for level in range(deepest):
            place = (nodes > of_text[level][..., None]).sum(axis=-1)
            places[..., deepest - 1, level] = np.where(np.isfinite(of_text[level]), place, UNRANKED)
    return places


@partial(jax.jit, static_argnames=("depth", "width"))
def _grown(drafting: Drafting, depth: int, width: int, spread: float) -> tuple[jax.Array, jax.Array]:
    """Returns the confidences of each level's best nodes, [depth, Q, R, 2 width], and of the text's, [depth, Q, R]."""
    ids, head = drafting.ids, drafting.head
    num_roots = ids.shape[1] - depth - 1
    feature = merged_features(head, [state[:, :num_roots] for state in drafting.states])[None]
    tokens = drafting.embedding[ids[:, 1 : 1 + num_roots]][None]  # [W, Q, R, D]
    confidence, is_text = jnp.zeros((1, *ids.shape[:1], num_roots)), jnp.ones((1, *ids.shape[:1], num_roots), bool)
    first: list[Keys] = []  # of the roots, which all nodes share
    chains: list[Keys] = []  # of the nodes' paths, [W, Q, R, K, H]
    found, of_text = [], []
    for step in range(depth):

        def one_node(
            tokens: jax.Array, feature: jax.Array, chains: list[Keys], first: list[Keys] = first, step: int = step
        ) -> tuple[jax.Array, Keys]:
            return draft_step(head, tokens, feature, step, [*first, *chains], HeadSizes())

        feature, keys = jax.vmap(one_node)(tokens, feature, chains)
        if step:
            chains.append(keys)
        else:
            first.append(jax.tree.map(lambda each: each[0], keys))
        nodes = [_scores_and_next(drafting, head_logits(head, feature[index]), step) for index in range(len(feature))]
        scores, is_next = (jnp.stack(each) for each in zip(*nodes, strict=True))
        logs = confidence[..., None] + jax.nn.log_softmax(scores / spread, axis=-1)
        best, choice = jax.lax.top_k(logs, 2 * width)  # [W, Q, R, 2 width]
        is_right = is_text[..., None] & jnp.take_along_axis(is_next, choice, axis=-1)
        flat = [jnp.moveaxis(each, 0, -2).reshape(*ids.shape[:1], num_roots, -1) for each in (best, choice, is_right)]
        top, where = jax.lax.top_k(flat[0], 2 * width)
        choice, is_right = (jnp.take_along_axis(each, where, axis=-1) for each in flat[1:])
        found.append(top)
        of_text.append(jnp.where(is_right, top, -jnp.inf).max(axis=-1))
        kept = [jnp.moveaxis(each[..., :width], -1, 0) for each in (top, choice, is_right, where // (2 * width))]
        confidence, choice, is_text, parents = kept
        tokens = drafting.embedding[drafting.token_ids[choice]]
        feature = _of_parents(feature, parents)
        chains = jax.tree.map(partial(_of_parents, parents=parents), chains)
    return jnp.stack(found), jnp.stack(of_text)


def _of_parents(each: jax.Array, parents: jax.Array) -> jax.Array:
    """Returns each [W', Q, R, ...] of the nodes `parents` [W', Q, R] of a level [W, Q, R, ...]."""
    return jnp.take_along_axis(each, parents.reshape(*parents.shape, *(1,) * (each.ndim - 3)), axis=0)


def _print_shares(ranks: np.ndarray, place: int) -> None:
    """Prints how often the text's token is each choice, where all before it were the first choice."""
    is_reached = (ranks[..., :place] == 0).all(axis=-1)
    shares = [float((ranks[..., place][is_reached] == rank).mean()) for rank in range(4)]
    print(f"draft {place + 1} where all before it hold: first to fourth choice {', '.join(f'{x:.1%}' for x in shares)}")


class _Row(NamedTuple):
    name: str
    num_nodes: int
    passes: int
    gain: Gain
    is_chain: bool = False
    tree: str = ""  # the paths of a fixed one


def _compare(
    fitted: np.ndarray, ranks: np.ndarray, places: np.ndarray | None, times: StepTimes, options: argparse.Namespace
) -> None:
    rows = list(_rows(fitted, ranks, places, options))
    speeds = {
        number: [times.speed(row.gain.tokens, number, row.num_nodes, row.passes, is_chain=row.is_chain) for row in rows]
        for number in options.batch
    }
    plain = {number: times.speed(1.0, number, 0, 0, is_chain=True) for number in options.batch}
    print("drafts                        positions  passes  tokens a step    speed by batch, to plain steps")
    for index, row in enumerate(rows):
        ratios = "  ".join(f"{number}: {speeds[number][index] / plain[number]:.3f}" for number in options.batch)
        print(f"{row.name:28}  {1 + row.num_nodes:9}  {row.passes:6}  {row.gain}  {ratios}")
    for number in options.batch:
        best_chain = max((speeds[number][index], row) for index, row in enumerate(rows) if row.is_chain)
        for kind in ("side by side", "fixed", "confidence"):
            of_kind = [(speeds[number][index], row) for index, row in enumerate(rows) if row.name.startswith(kind)]
            if of_kind:
                best = max(of_kind)
                print(
                    f"batch {number}: {best[1].name}, {1 + best[1].num_nodes} positions, {best[1].passes} passes: "
                    f"{best[0] / best_chain[0]:.3f} of {best_chain[1].name}  {best[1].tree}"
                )


def _rows(
    fitted: np.ndarray, ranks: np.ndarray, places: np.ndarray | None, options: argparse.Namespace
) -> Iterator[_Row]:
    for count in range(1, options.depth + 1):
        accepted = token_trees.accepted_by_tree(ranks, token_trees.chain(count))
        yield _Row(f"chain of {count}", count, count, gain(accepted), is_chain=True)
    for lengths in ((2, 1), (3, 1), (3, 3), (4, 2), (4, 3), (4, 4), (5, 2), (7, 7), (5, 5, 5), (6, 3, 3)):
        if max(lengths) <= options.depth:
            accepted = token_trees.accepted_by_tree(ranks, token_trees.side_by_side(lengths))
            yield _Row(f"side by side {lengths}", sum(lengths), max(lengths), gain(accepted))
    for positions in options.positions:
        for depth in range(1, min(options.depth, positions - 1) + 1):
            tree = token_trees.best_fixed_tree(fitted, positions - 1, depth)
            accepted = token_trees.accepted_by_tree(ranks, tree)
            paths = " ".join("".join(map(str, path)) for path in sorted(tree))
            yield _Row(f"fixed, {depth} deep", positions - 1, depth, gain(accepted), tree=paths)
    if places is None:
        return
    for positions in options.positions:
        for depth in range(1, min(options.depth, positions - 1) + 1):
            accepted = token_trees.accepted_by_order(places[..., depth - 1, :depth], positions - 1)
            yield _Row(f"confidence, {depth} deep", positions - 1, depth, gain(accepted))


def _print_lookup(name: str, texts: Sequence[Sequence[int]], num_known: int, options: argparse.Namespace) -> None:
    """Prints what prompt lookup brings as one chain and as two, in as many positions."""
    counts = {"chain": [0, 0], "two": [0, 0]}
    num_roots = num_matches = num_second = 0
    one, other = -(-options.lookup_drafts // 2), options.lookup_drafts // 2
    for text in texts:
        found = list(token_trees.looked_up(list(text), num_known, 3, options.lookup_drafts))
        num_roots += len(found)
        num_matches += sum(each is not None for each in found)
        num_second += sum(each is not None and each.second is not None for each in found)
        for kind in counts:
            root = 0
            while root < len(found):
                each = found[root]
                held = 0
                if each is not None:
                    is_two = kind == "two" and each.second is not None
                    held = max(min(each.first, one), min(each.second or 0, other)) if is_two else each.first
                    counts[kind][0] += 1 + held
                    counts[kind][1] += 1
                root += 1 + held
    print(
        f"prompt lookup, {name}: a match at {num_matches} of {num_roots} roots, two at {num_second}; tokens a step "
        f"with drafts: one chain of {options.lookup_drafts} {counts['chain'][0] / max(counts['chain'][1], 1):.3f}, "
        f"{one} and {other} where there are two {counts['two'][0] / max(counts['two'][1], 1):.3f}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench draft_trees", description="Count the tokens of steps with chains and trees of drafts."
    )
    parser.add_argument("--text", type=Path, required=True, help="a text whose parts are the prompts")
    parser.add_argument("--requests", type=int, default=96, help="half of them fit trees, half are counted")
    parser.add_argument("--input-tokens", type=int, default=64, help="input tokens of each request")
    parser.add_argument("--output-tokens", type=int, default=160, help="output tokens of each request")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--depth", type=int, default=7, help="the most draft tokens in a row")
    parser.add_argument("--width", type=int, default=8, help="nodes of a level that are expanded")
    parser.add_argument(
        "--towards", type=float, nargs="*", default=[], metavar="SHARE",
        help="also count with a head that is nearer to the served model by this share of its log-probabilities",
    )  # fmt: skip
    parser.add_argument("--positions", type=int, nargs="+", default=[4, 8, 16], help="verified positions of a request")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="requests in a step")
    parser.add_argument("--lookup-drafts", type=int, default=7, help="the most draft tokens of prompt lookup")
    parser.add_argument(
        "--lookup-text", type=Path, nargs="*", default=[], help="texts whose second halves are looked up, too"
    )
    parser.add_argument(
        "--step-ms", type=_pair, nargs="+", metavar="POSITIONS:MS", help="times of verifying steps by their positions",
        default=[(1, 5.376), (2, 5.429), (4, 5.519), (8, 5.66), (16, 5.9), (32, 5.9), (64, 6.95)],
    )  # fmt: skip
    parser.add_argument("--request-ms", type=float, default=0.05, help="what each further request adds to these")
    parser.add_argument("--chain-pass-ms", type=float, default=0.30, help="a pass of the head for a chain")
    parser.add_argument("--tree-pass-ms", type=float, default=0.33, help="a pass of the head for a tree")
    parser.add_argument("--host-ms", type=float, default=1.1, help="between two steps with drafts")
    parser.add_argument("--cpu-devices", type=int, default=1)
    return parser


def _pair(text: str) -> tuple[int, float]:
    positions, _, milliseconds = text.partition(":")
    return int(positions), float(milliseconds)


if __name__ == "__main__":
    raise SystemExit(main())

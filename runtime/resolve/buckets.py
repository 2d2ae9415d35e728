"""Declares the buckets of a server: the finite set of shapes of its steps, each with one compiled program."""

from collections.abc import Sequence

from ..adapters.bank import AdapterShape
from ..api.sampling_params import SamplingMode
from ..program.batch import ANY_MODE, Bucket

_MIN_MIXED_TOKENS = 64
# Below _MIN_MIXED_TOKENS, steps with adapters have these sizes only: without fused layers, they take as long.
_ADAPTER_STEP_TOKENS = (1, 8)
# Units for matrices pad the columns of all slots to about this many, so that large steps gain little with one slot's.
_PADDED_COLUMNS = 128


def declare_buckets(
    *,
    max_step_tokens: int,
    max_running: int,
    page_size: int,
    max_decode_steps: int = 1,
    max_fused_tokens: int = 0,
    has_drafts: bool = False,
    has_mode_programs: bool = False,
    is_pooling: bool = False,
) -> tuple[Bucket, ...]:
    """Returns the buckets of a server, smallest first.

    The numbers of tokens are the powers of two below `max_step_tokens`, `max_running` and `max_step_tokens` itself.
    With decode kernels, which serve up to `max_fused_tokens` decodes, there is also a size between two powers from 64
    on, so that decodes are padded less.

    Up to `max_running` tokens, a bucket has as many requests as tokens, so that steps of decodes are not padded. Each
    of these shapes also exists with `max_decode_steps` steps, if that is more than one.

    With decode kernels, shapes for decodes only have one program per sampling mode, because selecting the mode on the
    device would cost as much time as a layer. Larger ones, which use those kernels for attention alone, have one
    program for all modes, or with `has_mode_programs` also one per mode: over several GPUs, a choice between modes
    contains all-reduces and is no part of a CUDA graph, so the host would wait for the logits of each step to make it.
    Steps with prefill have no shapes below 64 tokens then, because a step of 64 tokens takes as long as one of 8, and
    each shape has to be compiled.

    With `has_drafts`, the shapes for decodes that use the decode kernels also take draft tokens. Between these and
    twice as many tokens, there are shapes for decodes with draft tokens, again with a program per mode: without a
    choice on the device, its kernels may be launched one by one (see `chips.compiler_options`).

    A model with `is_pooling` only computes prompts, in the shapes for prefill from 64 tokens on.
    """
    sizes = [2**power for power in range(max_step_tokens.bit_length()) if 2**power < max_step_tokens]
    has_decode_kernels = max_fused_tokens > 0
    if has_decode_kernels:
        sizes += [3 * size // 2 for size in sizes if size >= _MIN_MIXED_TOKENS and 3 * size // 2 < max_running]
    sizes = sorted({*sizes, max_running, max_step_tokens})
    larger_modes: Sequence[int] = tuple(SamplingMode) if has_mode_programs else (ANY_MODE,)
    buckets = []
    for num_tokens in sizes:
        num_requests = min(num_tokens, max_running)
        # A chunk of n tokens begins at most ceil(n / page_size) pages, and multi-step decode at most one per request.
        num_new_pages = num_requests + num_tokens // page_size
        shape = (num_tokens, num_requests, num_new_pages)
        if is_pooling:
            if num_tokens >= min(_MIN_MIXED_TOKENS, max_step_tokens):
                buckets.append(Bucket(*shape, is_pooling=True))
            continue
        is_fused = has_decode_kernels and num_tokens <= min(max_running, max_fused_tokens)
        if is_fused:  # before the general bucket, so that `BatchBuilder.bucket` finds it first
            buckets += [Bucket(*shape, is_decode=True, mode=mode, has_drafts=has_drafts) for mode in SamplingMode]
        elif has_decode_kernels and num_tokens <= max_running:
            buckets += [Bucket(*shape, is_decode=True, mode=mode) for mode in larger_modes]
            if has_drafts and num_tokens <= 2 * max_fused_tokens:
                buckets += [Bucket(*shape, is_decode=True, mode=mode, has_drafts=True) for mode in SamplingMode]
        if not has_decode_kernels or num_tokens >= min(_MIN_MIXED_TOKENS, max_step_tokens):
            buckets.append(Bucket(*shape))
        if max_decode_steps > 1 and num_tokens <= max_running:
            modes = SamplingMode if is_fused else larger_modes if has_decode_kernels else (ANY_MODE,)
            buckets += [Bucket(*shape, max_decode_steps, has_decode_kernels, mode) for mode in modes]
    return tuple(buckets)


def adapter_buckets(plain: Sequence[Bucket], adapters: AdapterShape) -> tuple[Bucket, ...]:
    """Returns the buckets of steps in which a request has an adapter, smallest first.

    They are added to those of a server without adapters, which stay as they are for other steps, and have fewer sizes
    and no modes, because each has to be compiled.

    Each size has a program for as many adapters as there are slots. Another serves steps whose tokens have the same
    adapter or none. It reads the matrices of one slot instead of all, which for an 8B model are 4 % of its weights with
    8 slots of rank 16, and 68 % with 32 of rank 64. Steps of more than 64 tokens wait for products instead, and have it
    only if all slots together are wide.

    Args:
      plain: The buckets of a server without adapters.
      adapters: The slots.
    """
    num_slots, num_steps = adapters.num_slots, max(bucket.num_steps for bucket in plain)
    most_multi_step = max((bucket.num_tokens for bucket in plain if bucket.num_steps > 1), default=0)
    largest = max(bucket.num_tokens for bucket in plain)
    needed = {*_ADAPTER_STEP_TOKENS, most_multi_step, max(bucket.num_requests for bucket in plain), largest}
    needed |= {2**power for power in range(largest.bit_length()) if 2**power >= _MIN_MIXED_TOKENS}
    is_wide = num_slots * adapters.rank > _PADDED_COLUMNS
    buckets = []
    for shape in sorted({(bucket.num_tokens, bucket.num_requests, bucket.num_new_pages) for bucket in plain}):
        num_tokens = shape[0]
        if num_tokens not in needed:
            continue
        has_one = is_wide or num_tokens <= _MIN_MIXED_TOKENS
        for num_adapters in sorted({1, num_slots} if has_one else {num_slots}):
            buckets.append(Bucket(*shape, is_pooling=plain[0].is_pooling, num_adapters=num_adapters))
            if num_tokens <= most_multi_step:
                buckets.append(Bucket(*shape, num_steps, num_adapters=num_adapters))
    return tuple(buckets)

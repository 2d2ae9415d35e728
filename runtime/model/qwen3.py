"""Qwen3 dense model (arXiv 2505.09388).

Step 6 of 10. In: the token ids of one step. Out: hidden states, and logits of a vocabulary shard.

All layers are alike: attention with grouped queries, whose query and key heads are normalized before the rotary
embedding (`layers.attention`), and a SwiGLU MLP (`layers.mlp`), each after a norm and with a residual connection
(`layers.decoder`). How the layers of a step are run, for example fused or in a loop, is decided in `strategies`.
"""

from .layers.decoder import Decoder, DecoderLayer


class Qwen3(Decoder):
    """The whole model."""

    layer_types = {"layers": DecoderLayer}

"""How does a model turn the token ids of a step into hidden states and logits?

Model classes as flax.nnx modules, written per shard.

Dimensions: T tokens, D embed, K groups of heads (KV heads, including repeats), G query heads per group, H head dim, F
mlp, V vocab.
"""

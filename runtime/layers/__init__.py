"""Parts of the decoder layers beside the model: the rotary embedding, and decode steps on the fused kernels."""

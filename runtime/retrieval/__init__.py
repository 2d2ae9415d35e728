"""How are texts embedded and documents ranked?

The prompts of embedding and reranking models, and what their results mean.
"""

"""Embedding and reranking models, whose result is computed from the last token of each prompt."""

"""Speculative decoding beside the core: who proposes draft tokens, which of them hold, and whether they pay."""

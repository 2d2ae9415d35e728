"""Which draft tokens does a step verify, and do they pay?

The host's part of speculative decoding.
"""

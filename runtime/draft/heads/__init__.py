"""How does a trained head (EAGLE-3 or a block drafter) propose draft tokens?

Its files, what steps keep for it, and its programs.
"""

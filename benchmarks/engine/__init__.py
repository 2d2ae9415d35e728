"""How fast is the engine without a server, step by step, and how fast does it start?

Apart from `load`: what these measure needs no gRPC, and no traffic but their own.
"""

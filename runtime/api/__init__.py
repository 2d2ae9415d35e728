"""What do all packages talk about?

Requests, sampling parameters, tenants, errors, the engine's interface, and the codec of public messages.
"""

"""How do several processes serve as one?

Membership, step stream, replay and watchdog.
"""

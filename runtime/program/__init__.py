"""How does a step plan run on the devices?

It becomes host arrays, and these run as compiled programs: forward pass and sampling.
"""

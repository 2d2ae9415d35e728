"""Where do pages go when the device has no room for them?

To host memory, and back when a request needs them.
"""

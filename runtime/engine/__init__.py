"""What happens between two steps?

The engine loop: plan, dispatch, collect and stream, one step ahead of the device.
"""

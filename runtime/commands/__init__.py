"""What can be typed after `meshserve`?

The command line and its commands.
"""

"""What is a server doing right now?

`meshserve top`: a live view in the terminal.
"""

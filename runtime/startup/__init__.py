"""How does a configuration become a serving process?

Also changes the TP size of a running one.
"""

"""What happens when a background task fails?

Every thread of a server that lives longer than the call that starts it runs under a `Supervisor`.
"""

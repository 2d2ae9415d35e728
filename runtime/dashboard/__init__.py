"""`meshserve top`: a live view of a running server in the terminal."""

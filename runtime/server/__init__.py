"""How does a gRPC call become a request, and its outputs a stream?

Authenticate, check, submit, stream, and map errors to status codes.
"""

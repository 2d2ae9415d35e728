"""The gRPC edge: authenticate, check, submit, stream, and map errors to status codes."""

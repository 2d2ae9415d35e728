"""What does a server sustain through gRPC, and how long do its callers wait?"""

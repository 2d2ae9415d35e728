"""A Ray Serve application of meshserve replicas."""

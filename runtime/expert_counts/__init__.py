"""Which experts a server's tokens choose: counted in the steps, summed up on the devices, read for metrics."""

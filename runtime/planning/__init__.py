"""What a model needs in memory and time on a machine, computed before there is one."""

"""From a configuration to a serving process; live changes of TP size."""

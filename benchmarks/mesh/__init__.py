"""Everything that is measured over several GPUs of one host, by one command: `meshserve bench mesh`."""

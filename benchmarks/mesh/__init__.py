"""What do several GPUs of one host reach? Everything that is measured over them, by `meshserve bench mesh`."""

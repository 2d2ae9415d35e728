"""How fast is one operation, and how near is it to the chip's data sheet? A module for each operation."""

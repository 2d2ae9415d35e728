"""Trained draft heads (EAGLE-3): their files, what steps keep for them, and how they propose draft tokens."""

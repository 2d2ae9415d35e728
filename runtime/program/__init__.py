"""Step plans become host arrays and run as compiled programs: forward pass and sampling."""

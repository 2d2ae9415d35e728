"""A draft model beside the served one: its programs, its weights, and the steps that propose draft tokens."""

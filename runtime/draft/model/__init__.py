"""How does a draft model beside the served one propose draft tokens?

Its programs, its cache, and its steps.
"""

"""What proposes draft tokens on the devices?

A draft model beside the served one (`model`), or a trained head (`heads`).
"""

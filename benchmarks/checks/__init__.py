"""Does it stay right: over hours, under faults, on compilers of chips that are not here, and as planned?"""

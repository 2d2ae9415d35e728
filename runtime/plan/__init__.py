"""What would a server need and reach on a machine?

Memory and time, computed before there is one: `meshserve plan`.
"""

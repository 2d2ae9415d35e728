"""What do options of other servers mean here?"""

"""A study from start to end, for whoever calls: the command line and other Python programs.

Nothing in here prints. `carbonopt.run` and `carbonopt.load` are its functions for users.
"""

"""The training tasks: each says what is trained and how the result is judged.

Each task is one file here and one line in `task.TASKS`.
"""

"""The tasks: what is trained, and how it is judged. Each is one file here and one line in `base.TASKS`."""

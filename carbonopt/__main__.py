"""The command line, for `python -m carbonopt`."""

from carbonopt.cli.app import main

main()

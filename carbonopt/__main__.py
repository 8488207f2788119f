"""`python -m carbonopt`: the command line."""

from carbonopt.cli.app import main

main()

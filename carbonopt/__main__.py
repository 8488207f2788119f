"""`python -m carbonopt`: the command line."""

from carbonopt.cli import main

main()

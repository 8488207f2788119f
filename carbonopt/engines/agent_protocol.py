"""The constants that a study and its agents on other machines share."""

BEGINS = b"carbonopt agent"  # the agent's first line; a shell may have printed others before
ALIVE_EVERY_S = 10.0  # the study says this often that it is alive
DEAD_AFTER_S = 90.0  # an agent that has heard nothing for so long ends its ranks and itself

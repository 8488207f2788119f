"""How the two programs end. The channel says more; the codes remain when a rank without one has to speak."""

FINISHED_EXIT = 0  # also after a stop, and after a divergence that the channel has reported
CRASH_EXIT = 1
BAD_INPUT_EXIT = 2
OUT_OF_MEMORY_EXIT = 78  # on any rank; those that then wait for it forever are the launcher's to end

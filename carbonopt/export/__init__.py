"""The exports of a study: the winner, which can be trained again, and its model card."""

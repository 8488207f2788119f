"""The exports of a study: the winner, which can be trained again, and the forms of standards."""

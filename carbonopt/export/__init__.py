"""What a study gives to the world outside of it: the winner, to be trained again, and its model card."""

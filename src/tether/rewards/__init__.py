"""A reward is a plain function: it gets the arguments it names and returns a number or None."""

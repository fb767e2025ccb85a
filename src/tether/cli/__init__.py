"""One small file a command: read the words typed, call the api, print. No logic of its own."""

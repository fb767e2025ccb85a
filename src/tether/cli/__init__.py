"""One small file per command: read the words typed, call the api, print. No logic of its own."""

"""Prompts from files, chat templates, collation: text becomes ids here, and only here is padded."""

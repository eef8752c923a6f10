"""Models: from a config's `model` section to a Hugging Face folder on disk."""

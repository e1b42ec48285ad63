"""Data of the examples: records and generated samples to token ids, patches and log-mel frames."""
